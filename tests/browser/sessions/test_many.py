"""A thousand sessions on the screen, some of which change: only what is in view is in the document."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import open_session, signal
from tests.serving import serve

pytestmark = pytest.mark.browser

SESSIONS, WITH_KV = 1000, 200


def test_a_thousand_sessions_are_shown_and_followed(open_page: OpenPage) -> None:
    with serve(kv_device=24 << 20, kv_host=24 << 20) as url, httpx.Client(base_url=url, timeout=60) as http:
        with ThreadPoolExecutor(4) as pool:
            opened = pool.map(
                lambda at: open_session(http, tokens=4 * (at < WITH_KV), name=f"agent-{at}"), range(SESSIONS)
            )
            sessions = list(opened)
        page = open_page(url)
        expect(page.locator(".cell")).to_have_count(WITH_KV)
        expect(page.get_by_role("main")).to_contain_text("1,000 sessions")
        assert page.locator("tbody tr[data-id]").count() < 60, "only rows in view are in the document"
        for session in sessions[:100]:
            signal(http, session, "io_wait")
        expect(page.locator('.cell[data-tier="host"]')).to_have_count(100)
        page.goto("about:blank")
