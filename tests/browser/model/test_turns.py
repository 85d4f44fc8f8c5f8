"""Inside the model: breakpoints on the ladder, and steps through a paused turn."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.conftest import WAIT_MS, OpenPage
from tests.browser.filling import SEE
from tests.browser.model.inside import PROMPT, Inside
from tests.serving import serve

pytestmark = pytest.mark.browser


def test_a_pause_is_armed_and_removed_by_pointer_and_by_keyboard(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.arm(1)
    (pause,) = inside.breakpoints("pause")
    assert (pause["layers"], pause["once"], pause["when"]["pass"]) == ([1], True, "any")
    assert [each["layers"] for each in inside.breakpoints("capture")] == [list(range(inside.layers))]
    inside.rung(1).click()
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
    assert not inside.get(f"{inside.path}/breakpoints")["data"]
    with inside.page.expect_response(lambda response: response.request.method == "DELETE"):
        inside.rung(1).dblclick()
    assert not inside.breakpoints("pause")
    inside.arm(2)
    assert [each["layers"] for each in inside.breakpoints("pause")] == [[2]]
    inside.page.get_by_label("How often to pause").select_option("each time")
    inside.page.get_by_label("In which pass to pause").select_option("decode")
    inside.rung(0).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "End", "ArrowUp", "ArrowUp", "Enter"):
        inside.page.keyboard.press(key)
    layer = inside.layers - 3
    expect(inside.rung(layer)).to_have_attribute("aria-pressed", "true")
    expect(inside.rung(layer)).to_be_focused()
    (pause,) = (each for each in inside.breakpoints("pause") if each["layers"] == [layer])
    assert (pause["once"], pause["when"]["pass"]) == (False, "decode")


def test_a_turn_pauses_and_goes_on_step_by_step(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
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
    assert inside.expect_idle()["tokens"] > length
    history = inside.get(f"{inside.path}/history")
    shown = inside.page.locator(".said")
    expect(shown).not_to_be_empty()
    assert history["text"].endswith(str(shown.text_content()))


def test_the_next_step_does_not_wait_for_news(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.pause_at(0)
    inside.page.reload()  # else news of the turn before its pause may still come
    inside.expect_pause(0)
    inside.page.evaluate(SEE, "hidden")  # as if the live stream were slow
    for _ in range(inside.layers - 1):
        inside.button("Next layer").click()
    inside.expect_pause(inside.layers - 1)
    expect(inside.page.get_by_role("alert")).to_have_count(0)


def test_a_turn_goes_on_to_the_next_breakpoint(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.arm(2)
    inside.pause_at(0)
    assert inside.breakpoints("pause")[0]["layers"] == [2]
    inside.button("Next breakpoint").click()
    inside.expect_pause(2)
    assert not inside.breakpoints("pause")


def test_a_refused_turn_keeps_what_was_typed(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    inside.start("keep this", temperature="-1")
    field = inside.page.get_by_label("Temperature")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description("temperature: a number from 0 to 100; got -1")
    expect(inside.page.get_by_label("Text", exact=True)).to_have_value("keep this")
    assert inside.view["tokens"] == 0


def test_a_paused_turn_that_was_lost_with_the_server_is_explained(open_page: OpenPage, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"state_dir": tmp_path / "state", "served_name": "smollm2-135m-instruct"}
    with serve(**kept) as url, httpx.Client(base_url=url, timeout=60) as http:
        inside = Inside(http, open_page, refusals=True)
        inside.pause_at(1)
        length = inside.view["tokens"]
        expect(inside.page.get_by_text("The pause ends by itself in")).to_be_visible()
    expect(inside.page.get_by_text("The pause ends by itself in")).to_have_count(0)
    figures = inside.page.get_by_role("banner").get_by_text("smollm2-135m-instruct · cpu · float32")
    assert figures.evaluate("text => text.offsetHeight <= text.parentElement.clientHeight")
    with serve(**kept, port=int(url.rpartition(":")[2])):
        turn = inside.page.get_by_role("region", name="Turn", exact=True)
        expect(turn.get_by_role("alert")).to_contain_text("The paused turn is over", timeout=WAIT_MS)
        expect(inside.page.get_by_label("Text", exact=True)).to_have_value(PROMPT)
        told = inside.page.get_by_role("alert")
        expect(told).to_have_count(1)  # the map asks for what is there now
        inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
        expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
        expect(told).to_contain_text(f"Lost with it, as at a restart: {length} tokens. Kept: 0 tokens.")
        expect(told).to_contain_text("The prompt is in its field again.")
        expect(told).to_be_in_viewport()
        inside.page.get_by_role("button", name="Send").click()
        expect(told).to_have_count(0)
        inside.page.goto("about:blank")


@contextmanager
def keeps_running(inside: Inside, session: str) -> Iterator[None]:
    """One long turn of the session after the other, in a thread."""
    ended = threading.Event()
    body = {"prompt": "go on", "max_tokens": 900, "temperature": 0, "ignore_eos": True}

    def run() -> None:
        while not ended.is_set():
            inside.post(f"/v1/sessions/{session}/generate", body)
            inside.post(f"/v1/sessions/{session}/rewind", {"to_token": 0})

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_page_shows_that_others_go_on(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.pause_at(1)
    others = inside.page.get_by_role("region", name="Others meanwhile")
    other = inside.post("/v1/sessions", {})["id"]
    with keeps_running(inside, other):
        expect(others).to_contain_text("1 turn running")
    inside.expect_pause(1)


def test_the_own_turn_is_none_of_the_others(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)  # of a map that the rewind has cut
    others = inside.page.get_by_role("region", name="Others meanwhile")
    with keeps_running(inside, inside.id):
        expect(inside.page.get_by_role("banner")).to_contain_text("1 turn running")
        expect(others.get_by_role("img")).to_have_accessible_name(re.compile("at most 0$"))
        expect(others).to_contain_text("0 turns running")
