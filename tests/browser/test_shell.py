"""The frame around every screen: which server this is, keys, and a server that goes and comes."""

from __future__ import annotations

import gzip
from pathlib import Path

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

import app
from tests.browser.conftest import WAIT_MS, OpenPage
from tests.browser.filling import open_session, signal
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

pytestmark = pytest.mark.browser

MOST_BYTES = 120 * 1000
"""Of all files as they are sent, each compressed by itself."""
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


def status(page: Page) -> Locator:
    return page.get_by_role("banner").get_by_role("status")


def test_a_server_that_restarts_comes_back_with_the_true_state(open_page: OpenPage, tmp_path: Path) -> None:
    with serve(state_dir=tmp_path / "state") as url:
        with httpx.Client(base_url=url, timeout=30) as http:
            kept, closed = open_session(http, tokens=20, name="kept"), open_session(http, name="closed")
        page = open_page(url, refusals=True)
        table = page.get_by_role("region", name="Table of sessions")
        expect(table).to_contain_text("closed")
        page.route("**/phase", lambda route: route.abort())
        page.get_by_role("button", name="Park kept").click()
        expect(table.get_by_role("alert")).to_have_text("The server is away.")
    expect(status(page)).to_contain_text("away")
    expect(page.locator(f'tr[data-id="{kept}"]')).to_contain_text("was idle")
    expect(page.get_by_role("button", name="Close closed")).to_be_disabled()
    expect(page.get_by_role("button", name="New session")).to_be_disabled()
    with serve(state_dir=tmp_path / "state", port=int(url.rpartition(":")[2])):
        with httpx.Client(base_url=url, timeout=30) as http:
            http.delete(f"/v1/sessions/{closed}").raise_for_status()
            open_session(http, name="new")
        expect(status(page)).to_have_text("Live", timeout=WAIT_MS)
        expect(table).to_contain_text("new")
        expect(table).not_to_contain_text("closed")
        expect(page.locator(f'tr[data-id="{kept}"]')).to_contain_text("20")
        expect(table).not_to_contain_text("was idle")
        expect(table.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_role("button", name="Park kept")).to_be_enabled()
        page.goto("about:blank")


def test_a_server_that_falls_silent_is_asked_again(open_page: OpenPage, page_server: str, http: httpx.Client) -> None:
    page = open_page(page_server)
    expect(status(page)).to_have_text("Live")
    page.clock.install()
    open_session(http, name="heard")  # the page counts from here, by this clock
    expect(page.get_by_role("heading", name="Sessions").locator("..")).to_contain_text("1 session")
    with page.expect_request("**/v1/events"):
        page.clock.fast_forward(20_000)
    expect(status(page)).to_have_text("Live")


def test_two_tabs_show_the_same(open_page: OpenPage, page_server: str, http: httpx.Client) -> None:
    session = open_session(http, tokens=20, name="shared")
    one, other = (open_page(page_server) for _ in range(2))
    one.get_by_role("button", name="Park shared").click()
    expect(other.locator(f'tr[data-id="{session}"]')).to_contain_text("io_wait")
    other.get_by_role("button", name="Close shared").click()
    other.get_by_role("button", name="Close the session").click()
    expect(one.locator(f'tr[data-id="{session}"]')).to_have_count(0)


def test_a_question_does_not_follow_to_another_screen(
    open_page: OpenPage, page_server: str, http: httpx.Client
) -> None:
    session = open_session(http, name="kept")
    page = open_page(page_server)
    page.get_by_role("link", name=session[-8:]).click()
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.get_by_role("dialog", name="Close session kept?")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(f'tr[data-id="{session}"]')).to_be_visible()


def test_a_session_of_another_tenant_is_not_there(open_page: OpenPage, tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"), tenant("rival"))
    with serve(tenants=file) as url, httpx.Client(base_url=url, headers={"Authorization": "Bearer acme"}) as http:
        session = open_session(http, name="secret")
        page = open_page(f"{url}/#/sessions/{session}", refusals=True)
        page.get_by_label("API key").fill("rival")
        page.get_by_label("API key").press("Enter")
        expect(page.get_by_role("heading", name="There is no such session")).to_be_visible()
        page.get_by_role("link", name="See all 0 sessions").click()
        expect(page.get_by_role("main")).to_contain_text("No session is open.")
        expect(page.get_by_role("main")).not_to_contain_text("secret")
        page.goto("about:blank")


def test_one_session_is_one_session(open_page: OpenPage, page_server: str, http: httpx.Client) -> None:
    open_session(http)
    page = open_page(f"{page_server}/#/sessions/gone")
    expect(page.get_by_role("link", name="See all 1 session", exact=True)).to_be_visible()


def test_keys_are_told_by_a_question_mark(open_page: OpenPage, page_server: str, http: httpx.Client) -> None:
    open_session(http, name="sought")
    page = open_page(page_server)
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog", name="Keyboard")
    expect(help_dialog).to_contain_text("find a session")
    page.keyboard.press("Escape")
    expect(help_dialog).to_be_hidden()
    page.keyboard.press("/")
    page.keyboard.type("so?g")
    expect(page.get_by_label("Find an id or a tag")).to_have_value("so?g")
    expect(help_dialog).to_be_hidden()


def test_single_keys_can_be_switched_off(open_page: OpenPage, page_server: str, http: httpx.Client) -> None:
    session = open_session(http)
    page = open_page(f"{page_server}/#/sessions/{session}")
    page.keyboard.press("?")
    page.get_by_label("The keys ?, / and g work").uncheck()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    for key in ("?", "g", "/"):
        page.keyboard.press(key)
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert page.url.endswith(session)
    page.get_by_role("button", name="Keyboard help").click()
    page.get_by_label("The keys ?, / and g work").check()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_screen_of_sessions_is_accessible(
    open_page: OpenPage, page_server: str, http: httpx.Client, scheme: str
) -> None:
    sessions = [open_session(http, tokens=tokens, name=f"of {tokens}") for tokens in (0, 40, 300)]
    signal(http, sessions[1], "io_wait")
    page = open_page(page_server, color_scheme=scheme)
    expect(page.locator(f'.cell[data-id="{sessions[2]}"]')).to_be_visible()
    page.get_by_label("Find an id or a tag").fill("of 300")
    expect(page.locator("tbody tr[data-id]")).to_have_count(1)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("width", [400, 3840])
def test_the_screen_fits_its_window(open_page: OpenPage, page_server: str, http: httpx.Client, width: int) -> None:
    session = open_session(http, tokens=40)
    page = open_page(page_server, viewport={"width": width, "height": 900})
    expect(page.locator(f'.cell[data-id="{session}"]')).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_all_files_together_are_small() -> None:
    files = [path for path in (Path(app.__path__[0]) / "static").rglob("*") if path.suffix in LOADED]
    own = [path for path in files if "swagger" not in path.as_posix()]
    assert own
    assert sum(len(gzip.compress(path.read_bytes())) for path in own) <= MOST_BYTES
