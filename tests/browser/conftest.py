"""Chromium before the page of a real server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serving import serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

collect_ignore_glob = [] if find_spec("playwright") else ["*"]  # `make setup-dev` installs it
BROWSER = "chromium-headless-shell"
"""Draws pages as Chromium does and has no windows: the tests take four fifths of the time."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
"""The first because CI runs as root."""
ARGUMENTS += ["--disable-background-networking", "--disable-component-update"]
SIZE: Any = {"width": 1280, "height": 900}
WAIT_MS = 30_000
"""For what the page should soon show, on a busy machine."""
DRAW_MS = 60_000
"""For the page of the API, of which each change draws all routes: seconds of a core that others use too."""
REFUSED = "Failed to load resource"
"""How Chromium begins its own line about an answer that is an error."""

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests; each page has a profile of its own."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    path = shutil.which(BROWSER)
    assert path is not None, f"the tests of the page need Chromium without windows: apt-get install {BROWSER}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def page_server() -> Iterator[str]:
    """Base URL of a server with a tiny model that the tests of this folder share."""
    with serve() as url:
        yield url


@pytest.fixture(scope="session")
def client(page_server: str) -> Iterator[httpx.Client]:
    """A client of `page_server`. To make one takes longer than most calls."""
    with httpx.Client(base_url=page_server, timeout=60) as client:
        yield client


@pytest.fixture
def http(client: httpx.Client) -> Iterator[httpx.Client]:
    """A client of `page_server`, which has no sessions before the test and none behind it."""
    close_all(client)
    yield client
    close_all(client)


def close_all(client: httpx.Client) -> None:
    while sessions := client.get("/v1/sessions", params={"limit": 100}).json()["data"]:
        for session in sessions:
            client.delete(f"/v1/sessions/{session['id']}")


@pytest.fixture(scope="session")
def new_tab(browser: Browser, page_server: str) -> Callable[..., Page]:
    """Opens a tab in a profile of that number. Those with the same options share it, and so the files of the page."""

    @cache
    def profile(number: int, **options: Any) -> BrowserContext:
        context = browser.new_context(**{"base_url": page_server, "reduced_motion": "reduce", **options})
        context.set_default_timeout(WAIT_MS)
        return context

    def new_tab(number: int, viewport: Any = SIZE, **options: Any) -> Page:
        page = profile(number, **options).new_page()
        page.set_viewport_size(viewport)
        return page

    return new_tab


@pytest.fixture
def open_page(new_tab: Callable[..., Page], http: httpx.Client) -> Iterator[OpenPage]:
    """Opens an address in a tab, by itself or as a path of `page_server`. The test fails if a tab logs an error or a
    warning, such as a breach of the policy; `refusals=True` lets the server refuse. Tabs close before the sessions.
    """
    pages: list[Page] = []
    said: list[str] = []

    def note(message: ConsoleMessage, refusals: bool) -> None:
        is_refusal = refusals and message.text.startswith(REFUSED)
        if message.type in ("error", "warning") and not is_refusal:
            said.append(f"{message.type}: {message.text} {message.location}")

    def open_page(url: str = "/", *, refusals: bool = False, **options: Any) -> Page:
        page = new_tab(len(pages), **options)  # of two tabs of one profile only the last is seen
        pages.append(page)
        page.on("console", lambda message: note(message, refusals))
        page.on("pageerror", lambda error: said.append(f"uncaught: {error}"))
        page.goto(url)
        return page

    yield open_page
    for page in pages:
        page.unroute_all(behavior="ignoreErrors")  # what a route still fetches would fail the next test
        page.close()
    assert not said, "\n".join(said)
