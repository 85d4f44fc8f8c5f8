"""A thousand sessions on the screen, of which a hundred change in each second: the page stays smooth."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import open_session, signal
from tests.serving import serve

pytestmark = pytest.mark.browser

SESSIONS = 1000
CHANGES_PER_S = 100
MOST_FRAME_MS = 33
MEASURE = """
async (seconds) => {
  const frames = [];
  const end = performance.now() + 1000 * seconds;
  let last = await new Promise(requestAnimationFrame);
  while (last < end) {
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  return frames.sort((one, other) => one - other);
}
"""


@contextmanager
def changing(http: httpx.Client, sessions: list[str]) -> Iterator[list[str]]:
    """Sessions go to the host and come back, a hundred each second; yields those that have, in order."""
    done: list[str] = []
    stop = threading.Event()

    def change() -> None:
        begun = time.monotonic()
        for number in itertools.count():
            if stop.wait(max(0.0, begun + number / CHANGES_PER_S - time.monotonic())):
                return
            session = sessions[number % len(sessions)]
            signal(http, session, ("io_wait", "ready")[number // len(sessions) % 2])
            done.append(session)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join()


def test_a_thousand_sessions_stay_smooth(open_page: OpenPage) -> None:
    with serve(kv_device=24 << 20, kv_host=24 << 20) as url, httpx.Client(base_url=url, timeout=60) as http:
        with ThreadPoolExecutor(4) as pool:
            sessions = list(
                pool.map(lambda number: open_session(http, tokens=4, name=f"agent-{number}"), range(SESSIONS))
            )
        page = open_page(url, reduced_motion="no-preference")
        expect(page.locator(".cell")).to_have_count(SESSIONS)
        expect(page.get_by_role("main")).to_contain_text("1,000 sessions")
        assert page.locator("tbody tr[data-id]").count() < 60, "only rows in view are in the document"
        with changing(http, sessions[:200]) as done:
            frames = page.evaluate(MEASURE, 6)
        assert len(done) >= 5 * CHANGES_PER_S
        print(
            "frames:",
            len(frames),
            "p50",
            frames[len(frames) // 2],
            "p95",
            frames[int(0.95 * len(frames))],
            "max",
            frames[-1],
        )
        assert frames[int(0.95 * len(frames))] < MOST_FRAME_MS
