"""Turns that break off, are lost with their server, or end unheard: what the session's screen says of them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import WAIT_MS, OpenPage
from tests.browser.filling import SEE, anew, wait_until
from tests.browser.session.on_session import LONG, OnSession, panel, send_to_the_end, write
from tests.processes import serve_process

pytestmark = pytest.mark.browser


def lose_the_turn(on: OnSession, page: Page) -> None:
    """As a restart of a server that had not kept the turn, while the page does not look."""
    page.evaluate(SEE, "hidden")
    on.post("cancel")
    on.post("rewind", to_token=0)
    page.route("**/v1/events", anew)
    page.evaluate(SEE, "visible")


def test_a_resume_that_breaks_off_brings_the_prompt_back_only_if_it_is_lost(on: OnSession) -> None:
    on.post("breakpoints", layer=2, action="pause", when={"pass": "decode"})
    page = on.open(refusals=True)
    send_to_the_end(page, "Hello")
    expect(page.get_by_role("region", name="Paused")).to_be_visible()
    refusal = {"error": {"message": "too many calls", "param": None}}
    page.route("**/resume", lambda route: route.fulfill(status=429, json=refusal), times=1)
    page.get_by_role("button", name="Resume to the end").click()
    expect(page.get_by_role("alert")).to_have_text("too many calls")
    page.route("**/resume", lambda route: route.fulfill(body="", content_type="text/event-stream"))
    page.get_by_role("button", name="Resume to the end").click()
    expect(page.get_by_role("alert")).to_have_text("The server went away during the turn.")
    expect(page.get_by_label("Text")).to_have_value("")
    assert on.history()["text"].startswith("<bos>Hello")
    lose_the_turn(on, page)
    expect(page.get_by_label("Text")).to_have_value("Hello")
    expect(page.get_by_text("The paused turn is over")).to_contain_text("The prompt is in its field again.")


def test_a_turn_that_breaks_off_empties_its_field_only_if_the_session_has_the_prompt(on: OnSession) -> None:
    page = on.open(refusals=True)
    view = re.compile(f"/v1/sessions/{on.id}$")

    def break_off(route: Route) -> None:
        page.route(view, lambda call: call.abort())
        text = route.fetch().text()
        route.fulfill(body=text.rpartition("event: ")[0], content_type="text/event-stream")

    page.route("**/generate", break_off, times=1)
    send, alert = page.get_by_role("button", name="Send"), page.get_by_role("alert")
    send_to_the_end(page, "Hello")
    expect(alert).to_have_text("The server went away during the turn.")
    expect(send).to_be_disabled()  # it would be sent twice, maybe
    page.unroute(view)
    expect(alert).to_have_text("The server went away during the turn. The session has the prompt.")
    expect(page.get_by_label("Text")).to_have_value("")
    expect(page.locator(".token")).to_have_count(10)

    def lose(route: Route) -> None:
        on.generate("Something else")
        route.abort()

    page.route("**/generate", lose, times=1)
    write(page, "Once more")
    send.click()
    expect(alert).to_have_text("The server is away.")
    expect(send).to_be_enabled()
    expect(page.get_by_label("Text")).to_have_value("Once more")
    send.click()
    expect(alert).to_have_count(0)
    assert on.history()["text"].count("Once more") == 1


def test_a_turn_that_dies_with_its_server_says_what_is_lost(
    open_page: OpenPage, roomy_model: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(roomy_model), "--max-model-len", "8192", "--kv-device", "64MiB")
    with serve_process(tmp_path / "state", *flags) as server, httpx.Client(base_url=server.url, timeout=60) as api:
        on = OnSession(api, open_page)
        on.generate()
        kept = on.view()["tokens"]
        page = on.open(refusals=True)
        send_to_the_end(page, "Once more", **{"Most tokens": str(LONG)})
        wait_until(api, on.id, lambda view: view["tokens"] > kept + 100)
        expect(panel(page, "Facts")).not_to_contain_text(f"{kept} tokens")
        server.kill()
        port = server.url.rpartition(":")[2]
    expect(page.get_by_role("alert")).to_have_text("The server went away during the turn.")
    with serve_process(tmp_path / "state", *flags, "--port", port):
        lost = rf"Lost with it, as at a restart: \d+ tokens\. Kept: {kept} tokens\.\s*$"
        expect(page.get_by_role("alert")).to_have_text(re.compile(lost), timeout=WAIT_MS)
        expect(page.get_by_label("Text")).to_have_value("Once more")
        page.goto("about:blank")
