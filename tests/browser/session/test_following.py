"""How the page follows the server: while it is hidden, when it comes back, and what it makes of the server's times."""

import json
import re
import time

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from tests.browser.conftest import WAIT_MS, OpenPage
from tests.browser.filling import SEE, anew, eventually, open_session
from tests.browser.session.conftest import OnSession, panel

pytestmark = pytest.mark.browser


def streams(http: httpx.Client) -> str:
    return next(line for line in http.get("/metrics").text.splitlines() if line.startswith("djinn_event_streams "))


def test_a_hidden_tab_holds_no_connection_and_misses_nothing(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page()
    session = open_session(http, name="before")
    expect(page.locator(f'tr[data-id="{session}"]')).to_be_visible()
    page.evaluate(SEE, "hidden")
    eventually(lambda: streams(http), wanted="djinn_event_streams 0.0")
    other = open_session(http, name="meanwhile")
    http.delete(f"/v1/sessions/{session}")
    with page.expect_request("**/v1/events") as asked:
        page.evaluate(SEE, "visible")
    assert asked.value.header_value("last-event-id")
    expect(page.locator(f'tr[data-id="{other}"]')).to_be_visible()
    expect(page.locator(f'tr[data-id="{session}"]')).to_have_count(0)


def test_a_turn_whose_end_was_missed_is_over(on_roomy: OnSession) -> None:
    page = on_roomy.open()
    lane = panel(page, "Timeline").locator(".lane", has_text="Turn").locator(".span")
    on_roomy.generate("Hi", tokens=3)
    expect(lane.last).to_have_attribute("title", re.compile("^length"))
    body = {"prompt": "Hello", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with on_roomy.api.stream("POST", f"/v1/sessions/{on_roomy.id}/generate", json=body) as turn:
        answer = turn.iter_lines()
        next(answer)
        expect(lane.last).to_have_attribute("title", "running")
        page.evaluate(SEE, "hidden")
        on_roomy.post("cancel")
    usage = on_roomy.wait_until(state="idle")["usage"]["last_turn"]
    page.route("**/v1/events", anew)
    page.evaluate(SEE, "visible")
    expect(lane.last).to_have_attribute("title", re.compile("^ended unseen"))
    expect(page.locator(".token")).to_have_count(usage["prompt_tokens"] + usage["completion_tokens"])
    expect(page.locator(".token.generated")).to_have_count(3 + usage["completion_tokens"])


SNAPSHOT = 'id: a-1\nevent: snapshot\ndata: {"time": 1, "sessions": [], "has_more": false}\n\n'
BROKEN = 'id: a-2\nevent: session\ndata: {"time": 1, "change": "changed", "session": null}\n\n'


def test_a_fault_of_the_page_is_told_as_its_own(browser: Browser, page_server: str) -> None:
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    asked: list[str | None] = []
    page.on("request", lambda request: asked.append(request.headers.get("last-event-id")))
    headers = {"Content-Type": "text/event-stream"}
    seen: list[Route] = []

    def break_once(route: Route) -> None:
        """One handler for all: to remove one may lose what the page asks meanwhile."""
        seen.append(route)
        route.fulfill(headers=headers, body=SNAPSHOT + BROKEN) if len(seen) == 1 else route.continue_()

    page.route("**/v1/events", break_once)
    page.goto(page_server)
    expect(page.get_by_role("alert")).to_contain_text("This page has a fault")
    expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Live")
    assert [each for each in asked if each] == ["a-2"], "it goes on behind the event"
    context.close()


def test_a_page_goes_on_with_its_turns_up_to_three(on: OnSession) -> None:
    page = on.open()
    others = [on.api.post("/v1/sessions").json()["id"] for _ in range(3)]
    page.route("**/generate", lambda route: None)  # turns that do not end
    for session in others:
        page.goto(f"/#/sessions/{session}")
        expect(page.get_by_role("heading", level=1)).to_contain_text(session[-8:])
        page.get_by_label("Text").fill("Hello")
        with page.expect_request("**/generate"):
            page.get_by_role("button", name="Send").click()
    page.goto(f"/#/sessions/{on.id}")
    page.get_by_label("Text").fill("Hello")
    send = page.get_by_role("button", name="Send")
    expect(send).to_be_disabled()
    expect(send).to_have_accessible_description(re.compile("This tab runs 3 turns"))
    expect(page.get_by_role("form", name="Generate")).to_contain_text("This tab runs 3 turns")


def test_times_are_the_servers_though_the_clock_is_wrong_and_the_page_was_hidden(on: OnSession) -> None:
    on.generate()
    page = on.open()
    page.add_init_script("(() => { const real = Date.now; Date.now = () => real() + 3 * 3600 * 1000; })()")
    page.reload()
    opened = panel(page, "Facts").locator("dl > div", has_text="Opened").get_by_role("definition")
    expect(opened).to_have_text(re.compile("^[^hd]+ ago$"))
    timeline = panel(page, "Timeline")
    timeline.get_by_text("As a table").click()
    expect(timeline.get_by_role("table")).to_contain_text("First seen")
    page.evaluate(SEE, "hidden")
    on.post("phase", phase="io_wait")
    time.sleep(1.1)  # the table tells seconds
    on.post("phase", phase="ready")
    page.evaluate(SEE, "visible")
    clocks = [
        timeline.get_by_role("row").filter(has_text=f"Phase {phase}").get_by_role("cell").first
        for phase in ("io_wait", "ready")
    ]
    expect(clocks[1]).to_be_visible()
    assert clocks[0].text_content() != clocks[1].text_content()


def test_a_turn_that_came_all_at_once_tells_how_it_ended(on: OnSession) -> None:
    """A busy server hears of the first and the last token together: then the waits fill all of the turn, or more."""
    now = time.time()
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0, "tokens_recomputed": 0}
    waits = {"queue": 5.0, "restore": 0.0, "prefill": 16.0}
    turn = {"time": now, "session_id": on.id, "status": "begun"}
    end = {"time": now + 0.02, "status": "finished", "finish_reason": "length", "usage": usage, "resume_ms": waits}
    snapshot = {"time": now, "sessions": [on.view()], "has_more": False}
    told = [("snapshot", snapshot), ("turn", turn), ("turn", turn | end)]
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in told)
    page = on.open()
    page.route("**/v1/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.reload()
    turns = panel(page, "Timeline").locator(".lane", has_text="Turn").locator(".span")
    expect(turns.last).to_have_attribute("title", "length after 20 ms")
    expect(turns.last).to_be_visible()
