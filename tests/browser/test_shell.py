"""The frame around every screen: which server this is, the keyboard's help, and a server that goes and comes."""

import gzip
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

import app
from tests.browser.conftest import DRAW_MS, OpenPage
from tests.browser.filling import eventually, expect_no_violations, open_session, row, signal
from tests.serving import serve

pytestmark = pytest.mark.browser

MOST_BYTES = 160 * 1000
"""Of all files as they are sent, each compressed by itself."""
LOADED = (".js", ".mjs", ".css", ".html")


def status(page: Page) -> Locator:
    return page.get_by_role("banner").get_by_role("status")


def activity(page: Page, said: str) -> Locator:
    return page.get_by_role("img", name=re.compile(f"^{said}"))


def test_the_page_says_which_server_it_shows_and_takes_any_address(open_page: OpenPage, http: httpx.Client) -> None:
    open_session(http)
    page = open_page("/#/%")  # which is no escaped text
    expect(page.get_by_role("banner")).to_contain_text("tiny-llama · cpu · float32")
    expect(status(page)).to_have_text("Live")
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    expect(page).to_have_title("Sessions · Djinn")
    page.goto("/#/sessions/%E0%A4%A")
    expect(page.get_by_role("heading", name="There is no such session")).to_be_visible()
    expect(page).to_have_title(re.compile("^Session .* · Djinn$"))
    page.goto("/#/sessions/gone")
    expect(page.get_by_role("link", name="See all 1 session", exact=True)).to_be_visible()


def test_the_theme_is_chosen_or_the_systems(open_page: OpenPage) -> None:
    page = open_page(color_scheme="dark")
    colors = []
    for theme in ("system", "light", "dark", "system"):
        button = page.get_by_role("button", name=f"Theme: {theme}")
        expect(button).to_be_visible()
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        button.click()
    system, light, dark, again = colors
    assert light != dark == system == again
    page.goto("/docs")  # a server without keys shows its routes at once
    expect(page.locator("#operations-tag-system")).to_be_visible(timeout=DRAW_MS)
    expect(page.get_by_label("API key")).to_be_hidden()


def test_a_server_that_restarts_comes_back_with_the_true_state(open_page: OpenPage, tmp_path: Path) -> None:
    with serve(state_dir=tmp_path / "state") as url:
        with httpx.Client(base_url=url, timeout=30) as http:
            kept, closed = open_session(http, tokens=20, name="kept"), open_session(http, name="closed")
        page = open_page(url, refusals=True)
        table = page.get_by_role("region", name="Table of sessions")
        expect(table).to_contain_text("closed")
        page.route("**/phase", lambda route: route.abort())
        page.get_by_role("button", name="Park kept").click()
        messages = page.get_by_role("list", name="Messages")
        expect(messages).to_contain_text(f"{kept[-8:]}: The server is away.")
    expect(status(page)).to_contain_text("away")
    expect(page.locator(f'tr[data-id="{kept}"]')).to_contain_text("had no turn")
    expect(page.get_by_role("button", name="Close closed")).to_be_disabled()
    expect(page.get_by_role("button", name="New session")).to_be_disabled()
    with serve(state_dir=tmp_path / "state", port=int(url.rpartition(":")[2])):
        with httpx.Client(base_url=url, timeout=30) as http:
            http.delete(f"/v1/sessions/{closed}").raise_for_status()
            open_session(http, name="new")
        expect(status(page)).to_have_text("Live")
        expect(table).to_contain_text("new")
        expect(table).not_to_contain_text("closed")
        expect(page.locator(f'tr[data-id="{kept}"]')).to_contain_text("20")
        expect(table).not_to_contain_text("had no turn")
        expect(messages.get_by_role("listitem")).to_have_count(0)
        expect(page.get_by_role("button", name="Park kept")).to_be_enabled()
        second = open_page(url)
        for each in (page, second):  # what the server did before, it remembers
            expect(activity(each, "Last hour, Agents: 1 at most, had turns")).to_be_visible()
            each.reload()
            expect(activity(each, "Last hour, Tokens: 20 computed, in 1 turn; ")).to_be_visible()
            each.get_by_label("Time of the charts").select_option("Last 30 days")
            expect(activity(each, "Last 30 days, Waits: .*s longest, of an agent")).to_be_visible()
            expect(each.locator(".mark.started").first.locator("title")).to_contain_text("The server started")
            each.get_by_label("Find an id or a tag").fill(f"closed {closed[-8:]}")
            each.get_by_role("region", name="Closed sessions").get_by_role("link").click()
            expect(each.get_by_role("heading", name=f"closed …{closed[-8:]} is closed")).to_be_visible()
            each.goto("about:blank")


def test_a_server_that_falls_silent_is_asked_again(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page(color_scheme="light")  # all tabs of a profile have one clock
    expect(status(page)).to_have_text("Live")
    page.clock.install()
    open_session(http, name="heard")  # the page counts from here, by this clock
    expect(page.get_by_role("heading", name="Sessions").locator("..")).to_contain_text("1 session")
    with page.expect_request("**/v1/events"):
        page.clock.fast_forward(20_000)
    expect(status(page)).to_have_text("Live")


def test_a_question_does_not_follow_to_another_screen(open_page: OpenPage, http: httpx.Client) -> None:
    session = open_session(http, tokens=20, name="kept")
    page, other = open_page(), open_page()
    other.get_by_role("button", name="Park kept").click()
    expect(page.locator(f'tr[data-id="{session}"]')).to_contain_text("io_wait")  # as in the other tab
    page.get_by_role("link", name=session[-8:]).click()
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.get_by_role("dialog", name="Close session kept?")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(f'tr[data-id="{session}"]')).to_be_visible()


def test_single_keys_are_told_and_can_be_switched_off(open_page: OpenPage, http: httpx.Client) -> None:
    session = open_session(http)
    page = open_page(f"/#/sessions/{session}")
    expect(page.get_by_role("region", name="Facts")).to_be_visible()
    page.keyboard.press("?")
    help_dialog = page.get_by_role("dialog", name="Keyboard")
    expect(help_dialog).to_contain_text("find a session")
    page.get_by_label("The keys ?, / and g work").uncheck()
    help_dialog.get_by_role("button", name="Close").click()
    for key in ("?", "g", "/"):
        page.keyboard.press(key)
    expect(help_dialog).to_be_hidden()
    assert page.url.endswith(session)
    page.get_by_role("button", name="Keyboard help").click()
    page.get_by_label("The keys ?, / and g work").check()
    page.keyboard.press("Escape")
    expect(help_dialog).to_be_hidden()
    page.keyboard.press("g")
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("so?g")
    expect(page.get_by_label("Find an id or a tag")).to_have_value("so?g")
    expect(help_dialog).to_be_hidden()


def test_the_screen_of_sessions_is_accessible_and_fits_any_window(open_page: OpenPage, http: httpx.Client) -> None:
    sessions = [open_session(http, tokens=tokens, name=f"of-{tokens}") for tokens in (0, 40, 300)]
    signal(http, sessions[1], "io_wait")
    page = open_page(viewport={"width": 400, "height": 900})
    page.get_by_label("What to do with of-300").click()
    page.get_by_role("dialog", name="of-300").get_by_role("button", name="Park").click()
    expect(row(page, sessions[2])).to_contain_text("io_wait")
    for width in (400, 3840, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator(f'.cell[data-id="{sessions[2]}"]')).to_be_visible()
        eventually(lambda: page.evaluate("document.documentElement.scrollWidth"), width)
    expect(row(page, sessions[0])).to_be_in_viewport()  # the table begins on the first screen
    page.get_by_label("Find an id or a tag").fill("of-300")
    expect(page.locator("tbody tr[data-id]")).to_have_count(1)
    expect_no_violations(page)


def test_all_files_together_are_small() -> None:
    files = [path for path in (Path(app.__path__[0]) / "static").rglob("*") if path.suffix in LOADED]
    own = [path for path in files if "swagger" not in path.parts and path.stem != "docs"]  # those are another page's
    assert own
    assert sum(len(gzip.compress(path.read_bytes())) for path in own) <= MOST_BYTES
