"""A new session before its screen for each test, and the API that says what a button has done."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, close_all
from tests.browser.filling import wait_until
from tests.serving import serve

GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = 8000
"""Tokens of a turn of the roomy server that is still running when a test looks at it."""


class OnSession:
    """One session of the server behind `api`; `open` shows its screen."""

    def __init__(self, api: httpx.Client, open_page: OpenPage, **body: Any) -> None:
        self.api = api
        self.id: str = api.post("/v1/sessions", json=body).raise_for_status().json()["id"]
        self._open_page = open_page

    def open(self, *, writes: str = "Prompt", **options: Any) -> Page:
        page = self._open_page(str(self.api.base_url.join(f"/#/sessions/{self.id}")), **options)
        expect(page.get_by_role("heading", level=1)).to_contain_text(self.id[-8:])
        page.get_by_label(writes, exact=True).check()
        return page

    def view(self) -> dict[str, Any]:
        return dict(self.api.get(f"/v1/sessions/{self.id}").raise_for_status().json())

    def history(self) -> dict[str, Any]:
        return dict(self.api.get(f"/v1/sessions/{self.id}/history").raise_for_status().json())

    def post(self, call: str, /, **body: Any) -> dict[str, Any]:
        """A call of another client."""
        return dict(self.api.post(f"/v1/sessions/{self.id}/{call}", json=body).raise_for_status().json())

    def generate(self, prompt: str = "Hello", tokens: int = 4) -> dict[str, Any]:
        """A turn of another client."""
        return self.post("generate", prompt=prompt, max_tokens=tokens, **GREEDY)

    def wait_until(self, **fields: Any) -> dict[str, Any]:
        """The session's view as soon as it has these values."""
        return wait_until(self.api, self.id, lambda view: all(view[name] == value for name, value in fields.items()))


def panel(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def write(page: Page, text: str, **fields: str) -> None:
    """Fill in the composer for a turn that is the same every time."""
    page.get_by_label("Text").fill(text)
    for label, value in {"Most tokens": "4", "Temperature": "0", **fields}.items():
        page.get_by_label(label, exact=True).fill(value)


def send(page: Page, text: str, **fields: str) -> None:
    write(page, text, **fields)
    page.get_by_role("button", name="Send").click()


def send_to_the_end(page: Page, text: str, **fields: str) -> None:
    """The same with a turn that runs to its most tokens."""
    ignore_the_end(page)
    send(page, text, **fields)


def ignore_the_end(page: Page) -> None:
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Ignore the end token").check()


TIMEOUT_S = 60


@pytest.fixture
def on(http: httpx.Client, open_page: OpenPage) -> OnSession:
    return OnSession(http, open_page, metadata={"agent": "tester"})


@pytest.fixture(scope="package")
def roomy_server(roomy_model: Path) -> Iterator[str]:
    """Base URL of a server with room for long histories, and for turns that do not end while a test looks at them."""
    with serve(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20) as url:
        yield url


@pytest.fixture
def roomy(roomy_server: str) -> Iterator[httpx.Client]:
    """A client of that server, whose sessions are closed behind the test's pages: one that is open asks for them."""
    with httpx.Client(base_url=roomy_server, timeout=TIMEOUT_S) as api:
        yield api
        close_all(api)


@pytest.fixture
def on_roomy(roomy: httpx.Client, open_page: OpenPage) -> OnSession:
    return OnSession(roomy, open_page)
