"""Inside the model: breakpoints on the ladder, and steps through a paused turn."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WAIT_MS, OpenPage
from tests.browser.filling import SEE, eventually
from tests.browser.model.inside import PROMPT, Inside
from tests.serving import serve

pytestmark = pytest.mark.browser


def test_a_click_on_a_layer_arms_a_pause_and_another_removes_it(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.arm(1)
    (pause,) = inside.breakpoints("pause")
    assert (pause["layers"], pause["once"], pause["when"]["pass"]) == ([1], True, "any")
    assert [each["layers"] for each in inside.breakpoints("capture")] == [list(range(inside.layers))]
    inside.rung(1).click()
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
    assert not inside.get(f"{inside.path}/breakpoints")["data"]


def test_two_quick_clicks_on_a_layer_leave_no_pause(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.rung(1).dblclick()
    eventually(lambda: len(inside.breakpoints("pause")), 0)
    inside.rung(2).click()
    expect(inside.rung(2)).to_have_attribute("aria-pressed", "true")
    assert [each["layers"] for each in inside.breakpoints("pause")] == [[2]]


def test_the_ladder_works_by_keyboard(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.page.get_by_label("How often to pause").select_option("each time")
    inside.page.get_by_label("In which pass to pause").select_option("decode")
    inside.rung(0).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End", "ArrowUp", "Enter"):
        inside.page.keyboard.press(key)
    layer = inside.layers - 2
    expect(inside.rung(layer)).to_have_attribute("aria-pressed", "true")
    expect(inside.rung(layer)).to_be_focused()
    (pause,) = inside.breakpoints("pause")
    assert (pause["layers"], pause["once"], pause["when"]["pass"]) == ([layer], False, "decode")


def test_watching_can_be_switched(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    watch = inside.page.get_by_label("Watch all layers")
    watch.check()
    eventually(lambda: len(inside.breakpoints("capture")), 1)
    watch.uncheck()
    eventually(lambda: inside.breakpoints("capture"), [])


def test_a_turn_pauses_and_goes_on_step_by_step(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.pause_at(0, tokens=3)
    inside.button("Next layer").click()
    assert inside.expect_pause(1)["pass"] == "prefill"
    inside.page.get_by_label("Layer to go to").select_option(str(inside.layers - 1))
    inside.button("To layer").click()
    inside.expect_pause(inside.layers - 1)
    expect(inside.button("Next layer")).to_be_disabled()
    length = inside.view["checkpoint"]["end"]
    inside.button("Next token").click()
    expect(inside.page.get_by_role("status").filter(has_text=f"decode of position {length}")).to_be_visible()
    assert inside.expect_pause(inside.layers - 1)["pass"] == "decode"
    inside.button("To the end").click()
    history = inside.get(f"{inside.path}/history")
    assert inside.expect_idle()["tokens"] > length
    shown = inside.page.locator(".said")
    expect(shown).not_to_be_empty()
    assert history["text"].endswith(str(shown.text_content()))


def test_the_next_step_does_not_wait_for_news(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.pause_at(0)
    inside.page.evaluate(SEE, "hidden")  # as if the live stream were slow
    for _ in range(inside.layers - 1):
        inside.button("Next layer").click()
    inside.expect_pause(inside.layers - 1)
    expect(inside.page.get_by_role("alert")).to_have_count(0)


def test_a_turn_goes_on_to_the_next_breakpoint(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.arm(2)
    inside.pause_at(0)
    assert inside.breakpoints("pause")[0]["layers"] == [2]
    inside.button("Next breakpoint").click()
    inside.expect_pause(2)
    assert not inside.breakpoints("pause")


def test_a_paused_turn_can_be_cancelled(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.pause_at(1)
    inside.button("Cancel the turn").click()
    inside.expect_idle()


def test_a_refused_turn_keeps_what_was_typed(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page, refusals=True)
    inside.start("keep this", temperature="-1")
    field = inside.page.get_by_label("Temperature")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description("temperature: a number from 0 to 100; got -1")
    expect(inside.page.get_by_label("Text", exact=True)).to_have_value("keep this")
    assert inside.view["tokens"] == 0


def test_a_paused_turn_that_was_lost_with_the_server_is_explained(open_page: OpenPage, tmp_path: Path) -> None:
    with serve(state_dir=tmp_path / "state") as url:
        inside = Inside(url, open_page, refusals=True)
        inside.pause_at(1)
        expect(inside.page.get_by_text("The pause ends by itself in")).to_be_visible()
    expect(inside.page.get_by_text("The pause ends by itself in")).to_have_count(0)
    with serve(state_dir=tmp_path / "state", port=int(url.rpartition(":")[2])):
        turn = inside.page.get_by_role("region", name="Turn", exact=True)
        expect(turn.get_by_role("alert")).to_contain_text("The paused turn is over", timeout=WAIT_MS)
        expect(inside.page.get_by_label("Text", exact=True)).to_have_value(PROMPT)
        inside.start(tokens=1)
        expect(turn.get_by_role("alert")).to_have_count(0)
        inside.page.goto("about:blank")


@contextmanager
def keeps_running(url: str, session: str) -> Iterator[None]:
    """One long turn of the session after the other, in a thread."""
    ended = threading.Event()
    body = {"prompt": "go on", "max_tokens": 900, "temperature": 0, "ignore_eos": True}

    def run() -> None:
        with httpx.Client(base_url=f"{url}/v1/sessions/{session}/", timeout=60) as http:
            while not ended.is_set():
                http.post("generate", json=body).raise_for_status()
                http.post("rewind", json={"to_token": 0}).raise_for_status()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_page_shows_that_others_go_on(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page)
    inside.pause_at(1)
    others = inside.page.get_by_role("region", name="Others meanwhile")
    other = inside.post("/v1/sessions", {})["id"]
    with keeps_running(page_server, other):
        expect(others).to_contain_text("1 turn running")
    inside.expect_pause(1)


def test_the_own_turn_is_none_of_the_others(open_page: OpenPage, page_server: str) -> None:
    inside = Inside(page_server, open_page, refusals=True)  # of a map that the rewind has cut
    others = inside.page.get_by_role("region", name="Others meanwhile")
    with keeps_running(page_server, inside.id):
        expect(inside.page.get_by_role("banner")).to_contain_text("1 turn running")
        expect(others.get_by_role("img")).to_have_accessible_name(re.compile("at most 0$"))
        expect(others).to_contain_text("0 turns running")
