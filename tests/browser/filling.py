"""Sessions for the page to show, with KV where a test wants it, and what is asked of every screen."""

import time
from collections.abc import Callable
from typing import Any

import httpx
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, Route

DEADLINE_S = 60
SEE = """(state) => {
  Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""Hides a tab, or shows it again: Chromium without a window does neither."""
DROP = """async ([names, bytes]) => {
    const dataTransfer = new DataTransfer();
    for (const name of names) dataTransfer.items.add(new File([new Uint8Array(bytes)], name));
    let taken = true;
    for (const type of ["dragover", "drop"]) {
        const event = new DragEvent(type, { dataTransfer, bubbles: true, cancelable: true });
        taken = !document.body.dispatchEvent(event);
    }
    return taken;
}"""


def drop(page: Page, content: bytes, *names: str) -> bool:
    """Drop files with this content on the screen; returns whether the page takes them, and not the browser."""
    return bool(page.evaluate(DROP, [list(names), list(content)]))


def open_session(http: httpx.Client, *, tokens: int = 0, **metadata: str) -> str:
    """The id of a new session with these labels, after a turn over so many tokens."""
    session: str = http.post("/v1/sessions", json={"metadata": metadata}).raise_for_status().json()["id"]
    if tokens:
        turn = {"token_ids": [5 + number % 90 for number in range(tokens)], "max_tokens": 0}
        http.post(f"/v1/sessions/{session}/generate", json=turn).raise_for_status()
    return session


def row(page: Page, session: str) -> Locator:
    """The row of a session in the table."""
    return page.locator(f'tr[data-id="{session}"]')


def signal(http: httpx.Client, session: str, phase: str) -> None:
    http.post(f"/v1/sessions/{session}/phase", json={"phase": phase}).raise_for_status()


def wait_until(http: httpx.Client, session: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The session, as soon as it is so."""
    view: dict[str, Any] = {}

    def look() -> bool:
        view.update(http.get(f"/v1/sessions/{session}").raise_for_status().json())
        return holds(view)

    eventually(look, wanted=True)
    return view


def eventually(found: Callable[[], Any], wanted: object) -> None:
    """`found()` becomes `wanted` while one waits."""
    deadline = time.monotonic() + DEADLINE_S
    while (last := found()) != wanted:
        assert time.monotonic() < deadline, f"{last!r} did not become {wanted!r}"
        time.sleep(0.02)


def anew(route: Route) -> None:
    """Ask for a snapshot, as if the gap had been long."""
    route.continue_(headers={name: value for name, value in route.request.headers.items() if name != "last-event-id"})


CONTRAST = {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}


def expect_no_violations(page: Page) -> None:
    """It breaks no rule, in either theme: only colours differ between them."""
    page.emulate_media(color_scheme="light")
    light = Axe().run(page)
    assert light.violations_count == 0, light.generate_report()
    page.emulate_media(color_scheme="dark")
    dark = Axe().run(page, options=CONTRAST)
    assert dark.violations_count == 0, dark.generate_report()
