"""The page of the HTTP API where no key is needed: test_keys.py has the rest of it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WAIT_MS, OpenPage

pytestmark = pytest.mark.browser


def test_a_server_without_keys_shows_its_routes_at_once(open_page: OpenPage, page_server: str) -> None:
    page = open_page(f"{page_server}/docs")
    expect(page.locator("#operations-system-getVersion")).to_be_visible(timeout=WAIT_MS)
    expect(page.get_by_label("API key")).to_be_hidden()
