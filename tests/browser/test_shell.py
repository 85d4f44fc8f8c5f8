"""The frame around every screen: which server this is, keys, and a server that goes and comes."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from playwright.sync_api import expect

import app
from tests.browser.conftest import OpenPage
from tests.serving import serve

pytestmark = pytest.mark.browser

MOST_BYTES = 120 * 1000
LOADED = (".js", ".mjs", ".css", ".html")


def test_the_page_says_which_server_it_shows(open_page: OpenPage, page_server: str) -> None:
    page = open_page(page_server)
    expect(page.get_by_role("banner")).to_contain_text("tiny-llama · cpu · float32")
    expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Live")


def test_a_server_with_keys_asks_for_one(open_page: OpenPage) -> None:
    with serve(api_keys=("right",)) as url:
        page = open_page(url, refusals=True)
        field = page.get_by_label("API key")
        field.fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        field.fill("right")
        field.press("Enter")
        expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Live")
        assert "right" not in page.url
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        page.get_by_role("button", name="Forget the key").click()
        expect(field).to_be_visible()


def test_all_files_together_are_small() -> None:
    files = [
        path
        for path in (Path(app.__path__[0]) / "static").rglob("*")
        if path.suffix in (".js", ".mjs", ".css", ".html")
    ]
    own = [path for path in files if "swagger" not in path.as_posix()]
    assert own
    assert sum(len(gzip.compress(path.read_bytes())) for path in own) <= MOST_BYTES
