"""Keys: how they are entered, and what ends with each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import WAIT_MS, OpenPage
from tests.browser.filling import open_session, wait_until
from tests.serving import serve

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def keyed_server(roomy_model: Path) -> Iterator[str]:
    """Base URL of a server with two keys, and with room for a turn that does not end while a test looks at it."""
    with serve(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20, api_keys=("right", "other")) as url:
        yield url


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")


def test_a_server_with_keys_asks_for_one_and_keeps_it_nowhere(open_page: OpenPage, keyed_server: str) -> None:
    page = open_page(keyed_server, refusals=True)
    status = page.get_by_role("banner").get_by_role("status")
    field = page.get_by_label("API key")
    field.fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    enter(page, "")
    expect(page.get_by_role("main")).not_to_contain_text("does not know this key")
    enter(page, " right  ")
    expect(status).to_have_text("Live")
    assert "right" not in page.url
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
    page.get_by_role("button", name="Forget the key").click()
    expect(field).to_be_visible()


def test_a_turn_of_the_last_key_ends_with_it(open_page: OpenPage, keyed_server: str) -> None:
    with httpx.Client(base_url=keyed_server, headers={"Authorization": "Bearer right"}) as http:
        session = open_session(http, name="busy")
        page = open_page(f"{keyed_server}/#/sessions/{session}", refusals=True)
        enter(page, "right")
        page.get_by_label("Text").fill("Hello")
        page.get_by_label("Most tokens").fill("8000")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Ignore the end token").check()
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".token.generated").nth(3)).to_be_visible()
        page.get_by_role("button", name="Forget the key").click()
        view = wait_until(http, session, lambda view: view["state"] == "idle")
        assert 6 < view["tokens"] < 8000


def test_the_page_of_the_api_asks_for_a_key_and_tries_a_route_with_it(open_page: OpenPage, keyed_server: str) -> None:
    page = open_page(f"{keyed_server}/docs", refusals=True)
    field = page.get_by_label("API key")
    field.fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
    field.fill("right")
    field.press("Enter")
    route = page.locator("#operations-system-getVersion")
    route.get_by_role("button").first.click()
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table")).to_contain_text('"hidden_size"', timeout=WAIT_MS)
    assert "right" not in page.url
