"""The page of the HTTP API works without a network, under the policy of every page."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WAIT_MS, OpenPage
from tests.serving import serve

pytestmark = pytest.mark.browser


def test_the_routes_are_shown_and_can_be_tried(open_page: OpenPage, page_server: str) -> None:
    page = open_page(f"{page_server}/docs")
    route = page.locator("#operations-system-getVersion")
    route.get_by_role("button").first.click()
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table")).to_contain_text("tiny-llama", timeout=WAIT_MS)


def test_a_server_with_keys_asks_for_one_first(open_page: OpenPage) -> None:
    with serve(api_keys=("right",)) as url:
        page = open_page(f"{url}/docs", refusals=True)
        field = page.get_by_label("API key")
        field.fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
        field.fill("right")
        field.press("Enter")
        expect(page.locator("#operations-system-getVersion")).to_be_visible(timeout=WAIT_MS)
        assert "right" not in page.url
