"""Inside the model: breakpoints on the ladder, steps through a paused turn, and what is typed meanwhile."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import SEE, eventually, expect_no_violations
from tests.browser.model.conftest import PROMPT, Inside
from tests.serving import serve

pytestmark = pytest.mark.browser


def test_a_pause_is_armed_and_removed_by_pointer_and_by_keyboard(inside: Inside) -> None:
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


def test_a_turn_pauses_and_goes_on_step_by_step(inside: Inside) -> None:
    asked: list[str] = []
    inside.page.on("request", lambda request: asked.append(request.url))
    inside.arm(2)
    inside.arm(0)
    inside.page.get_by_label("Text", exact=True).fill(PROMPT)
    inside.page.get_by_label("Most tokens").fill("3")
    inside.page.get_by_label("Temperature").fill("0")
    inside.button("Start the turn").dblclick()
    inside.expect_pause(0)
    assert len([url for url in asked if url.endswith("/generate")]) == 1
    assert inside.breakpoints("pause")[0]["layers"] == [2]
    inside.button("Next layer").click()
    assert inside.expect_pause(1)["pass"] == "prefill"
    inside.button("Next breakpoint").click()
    inside.expect_pause(2)
    assert not inside.breakpoints("pause")
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


def test_the_next_step_does_not_wait_for_news(inside: Inside) -> None:
    inside.pause_at(0)
    inside.page.reload()  # else news of the turn before its pause may still come
    inside.expect_pause(0)
    inside.page.evaluate(SEE, "hidden")  # as if the live stream were slow
    for _ in range(inside.layers - 1):
        inside.button("Next layer").click()
    inside.expect_pause(inside.layers - 1)
    expect(inside.page.get_by_role("alert")).to_have_count(0)


def test_a_paused_turn_that_was_lost_with_the_server_is_explained(open_page: OpenPage, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"state_dir": tmp_path / "state", "served_model_name": "smollm2-135m-instruct"}
    with serve(**kept) as url, httpx.Client(base_url=url, timeout=60) as http:
        inside = Inside(http, open_page, refusals=True)
        inside.pause_at(1)
        length = inside.view["tokens"]
        expect(inside.page.get_by_text("It ends by itself in")).to_be_visible()
    expect(inside.page.get_by_text("It ends by itself in")).to_have_count(0)
    figures = inside.page.get_by_role("banner").get_by_text("smollm2-135m-instruct · cpu · float32")
    assert figures.evaluate("text => text.offsetHeight <= text.parentElement.clientHeight")
    with serve(**kept, port=int(url.rpartition(":")[2])):
        turn = inside.page.get_by_role("region", name="Turn", exact=True)
        expect(turn.get_by_role("alert")).to_contain_text("A restart of the server ended the turn")
        expect(inside.page.get_by_label("Text", exact=True)).to_have_value(PROMPT)
        told = inside.page.get_by_role("alert")
        expect(told).to_have_count(1)  # the map asks for what is there now
        inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
        expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
        expect(told).to_contain_text(f"Lost with it: {length} tokens. Kept: 0 tokens.")
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


def test_the_page_tells_of_turns_of_others_and_not_of_its_own(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)  # of a map that the rewind has cut
    others = inside.page.get_by_role("region", name="Others meanwhile")
    with keeps_running(inside, inside.id):
        expect(inside.page.get_by_role("banner")).to_contain_text("1 turn running")
        expect(others).to_contain_text("0 turns running")
    inside.pause_at(1)
    with keeps_running(inside, inside.post("/v1/sessions", {})["id"]):
        expect(others).to_contain_text("1 turn running")
    inside.expect_pause(1)


def test_captures_of_a_program_stay(inside: Inside) -> None:
    mine = inside.post(f"{inside.path}/breakpoints", {"layers": [0, 2], "action": "capture"})
    inside.page.reload()
    expect(inside.rung(2)).to_have_accessible_name(re.compile("captures"))
    watch = inside.page.get_by_label("Watch all layers")
    expect(watch).not_to_be_checked()
    inside.arm(1)
    expect(watch).to_be_checked()
    inside.rung(1).click()
    expect(watch).not_to_be_checked()
    assert inside.get(f"{inside.path}/breakpoints")["data"] == [mine]
    watch.click()
    eventually(lambda: len(inside.breakpoints("capture")), 2)
    expect(watch).to_be_checked()
    watch.click()
    eventually(lambda: inside.breakpoints("capture"), [mine])


def test_the_watch_of_a_pause_ends_with_its_turn_and_one_that_was_asked_for_outlives_it(inside: Inside) -> None:
    watch = inside.page.get_by_label("Watch all layers")
    for asked_for in (False, True):
        if asked_for:
            watch.click()  # `check` wants it to be so at once: the server has the last word
            eventually(lambda: len(inside.breakpoints("capture")), 1)
        inside.pause_at(1)
        assert len(inside.breakpoints("capture")) == 1
        inside.button("To the end").click()
        inside.expect_idle()
        expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
        expect(watch).to_be_checked(checked=asked_for)
        assert len(inside.breakpoints("capture")) == asked_for


def test_what_others_have_just_removed_or_armed_is_no_obstacle(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    others: dict[str, Callable[[], object]] = {}  # by the method of what the page asks

    def others_are_sooner(route: Route) -> None:
        """One handler for the whole test: to remove one may lose what the page asks meanwhile."""
        others.pop(route.request.method, lambda: None)()
        route.continue_()

    inside.arm(1)
    inside.page.route(re.compile("/breakpoints(/[^/]*)?$"), others_are_sooner)
    others["DELETE"] = lambda: inside.call("DELETE", f"{inside.path}/breakpoints")
    inside.rung(1).click()
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
    inside.page.wait_for_timeout(500)  # at the news of this the page looks once more
    others["GET"] = lambda: inside.post(f"{inside.path}/breakpoints", {"layer": 1, "action": "pause"})
    inside.arm(1)
    assert [each["layers"] for each in inside.breakpoints("pause")] == [[1]]
    expect(inside.page.get_by_role("alert")).to_have_count(0)


def test_another_tab_and_a_return_to_the_screen_show_what_is_armed_now(inside: Inside, open_page: OpenPage) -> None:
    inside.arm(1)
    own = inside.rung(1)
    other = open_page(inside.page.url)
    rung = other.get_by_label("Layers: choose one to pause after it").get_by_role("button").nth(1)
    expect(rung).to_have_attribute("aria-pressed", "true")
    rung.click()
    expect(rung).to_have_attribute("aria-pressed", "false")
    expect(own).to_have_attribute("aria-pressed", "false")
    own.click()
    expect(rung).to_have_attribute("aria-pressed", "true")
    assert len(inside.breakpoints("pause")) == 1
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    inside.call("DELETE", f"{inside.path}/breakpoints")
    inside.post(f"{inside.path}/breakpoints", {"layer": 2, "action": "pause"})
    inside.page.go_back()
    expect(inside.rung(2)).to_have_attribute("aria-pressed", "true")
    expect(own).to_have_attribute("aria-pressed", "false")


def test_a_draft_outlives_a_pause_and_other_screens(inside: Inside) -> None:
    inside.arm(1)
    inside.page.get_by_label("How often to pause").select_option("each time")
    text, seed = inside.page.get_by_label("Text", exact=True), inside.page.get_by_label("Seed")
    text.fill("Half a thought")
    seed.fill("7")
    two = inside.page.get_by_role("region", name="Steering")
    two.get_by_label("Less of").fill("hate")
    inside.post(f"{inside.path}/generate", {"prompt": PROMPT, "max_tokens": 4})
    inside.expect_pause(1)
    inside.button("Cancel the turn").click()
    inside.expect_idle()
    expect(text).to_have_value("Half a thought")
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    expect(text).to_have_value("Half a thought")
    expect(seed).to_have_value("7")
    inside.page.go_back()
    expect(two.get_by_label("Less of")).to_have_value("hate")
    expect(inside.page.get_by_label("How often to pause")).to_have_value("each")
    expect(text).to_have_value("Half a thought")


FITS = "document.documentElement.scrollWidth <= innerWidth"


def test_it_breaks_no_rule_of_accessibility_and_fits_any_window(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, viewport={"width": 400, "height": 900})
    inside.page.get_by_text("How it chooses tokens").click()
    expect_no_violations(inside.page)
    inside.pause_at(1)
    for width in (400, 3840, 1280):
        inside.page.set_viewport_size({"width": width, "height": 900})
        expect(inside.cell(1, inside.view["checkpoint"]["end"] - 1)).not_to_be_empty()
        eventually(lambda: inside.page.evaluate(FITS), wanted=True)
    inside.cell(1, 3).click()
    inside.page.locator(".tops button").first.click()
    inside.button("Try it").click()
    expect(inside.page.get_by_role("table", name="After")).to_be_visible()
    expect_no_violations(inside.page)
