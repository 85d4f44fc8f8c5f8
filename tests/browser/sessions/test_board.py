"""The board: each session where its KV is, by pointer and by keyboard, and a thousand of them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import open_session, signal, wait_until
from tests.serving import serve

pytestmark = pytest.mark.browser


def cells(page: Page, session: str) -> Locator:
    return page.locator(f'.cell[data-id="{session}"]')


def test_a_session_moves_between_the_lanes_with_its_kv(open_page: OpenPage, http: httpx.Client) -> None:
    session = open_session(http, tokens=40, name="traveller")
    page = open_page()
    cell = cells(page, session)
    expect(cell).to_have_attribute("data-tier", "device")
    expect(cell).to_have_accessible_name(re.compile("traveller, at hand; 40 tokens, .* on the device"))
    signal(http, session, "io_wait")
    wait_until(http, session, lambda view: view["kv"]["tier"] == "host")
    expect(cell).to_have_attribute("data-tier", "host")
    expect(cell).to_have_accessible_name(re.compile("traveller, waiting; .* on the host"))
    lane: Any = page.get_by_role("region", name="Host tier").bounding_box()
    drawn: Any = cell.bounding_box()
    assert lane["y"] < drawn["y"] < lane["y"] + lane["height"]


def test_arrow_keys_go_from_cell_to_cell_whose_tooltips_tell_what_they_hold(
    open_page: OpenPage, http: httpx.Client
) -> None:
    on_device, on_host = (open_session(http, tokens=40, name=name, team="blue") for name in ("above", "below"))
    parked = {"phase": "io_wait", "resume_in_ms": 3_600_000}
    http.post(f"/v1/sessions/{on_host}/phase", json=parked).raise_for_status()
    page = open_page()
    expect(cells(page, on_host)).to_have_attribute("data-tier", "host")
    page.get_by_role("group", name="Board of sessions by tier").focus()
    page.keyboard.press("ArrowDown")
    expect(cells(page, on_device)).to_be_focused()
    tip = page.get_by_role("tooltip")
    for text in (on_device, "name: above, team: blue", "40 tokens", "48 KiB on the device", "phase compute", "prefill"):
        expect(tip).to_contain_text(text)
    page.keyboard.press("ArrowDown")
    expect(cells(page, on_host)).to_be_focused()
    expect(tip).to_contain_text(re.compile("Returns *in (59 min|1 h)"))
    page.keyboard.press("ArrowUp")
    cells(page, on_host).hover()
    expect(tip).to_contain_text(on_host)
    page.get_by_role("heading", name="Sessions").hover()
    expect(cells(page, on_device)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/sessions/{on_device}$"))
    page.goto("about:blank")  # before the session is closed


def test_cells_are_as_large_as_their_bytes(open_page: OpenPage, http: httpx.Client) -> None:
    small, large = (open_session(http, tokens=tokens, name=f"of {tokens}") for tokens in (128, 512))
    page = open_page()
    boxes: list[Any] = [cells(page, session).bounding_box() for session in (small, large)]
    areas = [box["width"] * box["height"] for box in boxes]
    assert areas[1] / areas[0] == pytest.approx(4, rel=0.25)
    assert cells(page, small).evaluate("cell => getComputedStyle(cell).textOverflow") == "ellipsis"


def test_lanes_and_charts_tell_of_memory_with_units(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page()
    device, host = (page.get_by_role("region", name=f"{tier} tier") for tier in ("Device", "Host"))
    expect(device).to_contain_text("Empty. Open a session and send it a prompt")
    expect(host).to_contain_text("Empty. Park a session")
    expect(host).to_contain_text("free of 16 MiB")
    expect(page.get_by_role("region", name="Disk tier")).to_contain_text("No disk tier")
    session = open_session(http, tokens=40)
    expect(device).not_to_contain_text("Empty.")
    expect(device).to_contain_text(re.compile(r"KiB owned.*free of 4\.0 MiB.*weights"))
    charts = page.get_by_role("region", name="The last 10 minutes")
    expect(charts.get_by_role("img", name=re.compile("^Device memory .* now 48 KiB owned"))).to_be_visible()
    expect(charts.get_by_role("img", name=re.compile("^Turns .* 0 running and 0 waiting"))).to_be_visible()
    signal(http, session, "io_wait")
    moves = charts.get_by_role("img", name=re.compile("^Moves .* to host: .* copies run at .* MiB"))
    expect(moves).to_be_visible()
    expect(moves.locator("text").first).to_have_text("0 MiB/s")


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
