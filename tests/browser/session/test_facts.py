"""What a session's screen tells: figures, breakpoints, forks, and what has happened."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.accessibility import expect_no_violations
from tests.browser.conftest import OpenPage
from tests.browser.filling import SEE
from tests.browser.session.on_session import GREEDY, LONG, OnSession, panel

pytestmark = pytest.mark.browser

WIDTHS = (400, 1280, 3840)


def fact(page: Page, name: str) -> str:
    """What the facts say under a name."""
    row = panel(page, "Facts").locator(
        "dl > div", has=page.get_by_role("term").filter(has_text=re.compile(f"^{name}$"))
    )
    return row.get_by_role("definition").inner_text()


def test_the_figures_are_those_of_the_api(http: httpx.Client, open_page: OpenPage) -> None:
    on = OnSession(http, open_page, metadata={"agent": "tester", "x" * 64: "value"})
    on.generate("Hello", tokens=40)
    page = on.open()
    usage = on.view()["usage"]
    assert fact(page, "History") == "46 tokens"
    assert fact(page, "Generated") == "40 tokens"
    assert fact(page, "Prompts") == f"{usage['prompt_tokens']} tokens, {usage['cached_tokens']} cached"
    assert fact(page, "agent") == "tester"
    assert fact(page, "Id") == on.id
    left = fact(page, "Closes by itself")
    assert re.fullmatch("in (29 d 23 h|30 d 0 h) without a turn", left)  # the page's clock may be a second behind
    name = panel(page, "Facts").get_by_role("term").filter(has_text="xxx")
    assert name.evaluate("(name) => name.scrollWidth <= name.clientWidth"), "a long name stays in its column"
    assert fact(page, "x" * 64) == "value"
    on.generate(" and", tokens=2)
    expect(panel(page, "Facts")).to_contain_text("42 tokens")


def test_tokens_and_kv_of_anothers_turn_grow_as_they_come(on_roomy: OnSession) -> None:
    page = on_roomy.open()
    count = panel(page, "Conversation").locator(".number").first
    expect(count).to_have_text("0 tokens")
    held = page.get_by_role("list", name="KV by tier").locator(".number").first
    body = {"prompt": "Hello", "max_tokens": LONG, **GREEDY, "stream": True}
    with on_roomy.api.stream("POST", f"/v1/sessions/{on_roomy.id}/generate", json=body) as turn:
        answer = turn.iter_lines()
        next(answer)
        expect(held).not_to_have_text("0 B")
        expect(count).not_to_have_text(re.compile("^[0-9]? tokens?$"))
        tokens, kv = count.inner_text(), held.inner_text()
        expect(count).not_to_have_text(tokens)
        expect(held).not_to_have_text(kv)
        expect(page.get_by_text("Another client runs a turn")).to_be_visible()
        assert on_roomy.view()["state"] == "running"


def test_breakpoints_are_listed_and_removed(on: OnSession) -> None:
    for layer in (1, 2):
        on.post("breakpoints", layer=layer, action="capture", when={"pass": "prefill", "every": 4})
    on.post("breakpoints", layers=[0, 3], action="edit", edits=[{"op": "scale", "factor": 0.9}], once=True)
    page = on.open()
    listed = panel(page, "Breakpoints").get_by_role("listitem")
    expect(listed).to_have_count(3)
    expect(listed.first).to_contain_text("capture after layer 1 in prefill every 4 positions")
    expect(listed.last).to_contain_text("edit after layers 0, 3 (scale 0.9) once")
    page.get_by_role("button", name="Remove capture after layer 1").click()
    expect(listed).to_have_count(2)
    armed = on.api.get(f"/v1/sessions/{on.id}/breakpoints").json()["data"]
    assert [each["layers"] for each in armed] == [[2], [0, 3]]
    page.get_by_role("button", name="Remove all").click()
    expect(panel(page, "Breakpoints")).to_contain_text("None is armed")
    assert on.api.get(f"/v1/sessions/{on.id}/breakpoints").json()["data"] == []
    on.post("breakpoints", layer=1, action="capture")  # another client's
    expect(panel(page, "Breakpoints")).to_contain_text("capture after layer 1")
    on.api.delete(f"/v1/sessions/{on.id}/breakpoints").raise_for_status()
    expect(panel(page, "Breakpoints")).to_contain_text("None is armed")


def test_the_tree_of_forks_leads_to_each(on: OnSession) -> None:
    on.generate()
    child = on.post("fork")["id"]
    on.api.post(f"/v1/sessions/{child}/rewind", json={"to_token": 3}).raise_for_status()
    grandchild = on.api.post(f"/v1/sessions/{child}/fork").raise_for_status().json()["id"]
    page = on.open()
    tree = panel(page, "Forks")
    expect(tree.get_by_role("link")).to_have_count(3)
    assert [link.get_attribute("href") for link in tree.get_by_role("link").all()] == [
        f"#/sessions/{each}" for each in (on.id, child, grandchild)
    ]
    expect(tree.locator("li li li")).to_contain_text(re.compile(r"idle\s*3 tokens · forked at 3"))
    tree.get_by_role("link").last.click()
    expect(page).to_have_url(re.compile(grandchild))
    expect(tree.locator("[aria-current=true]")).to_have_attribute("href", f"#/sessions/{grandchild}")
    on.api.delete(f"/v1/sessions/{child}")
    expect(tree.get_by_role("link")).to_have_count(1)
    expect(tree).to_contain_text("which is closed, at 3")


def test_the_timeline_tells_what_a_turn_waited_for_and_where_it_paused(on: OnSession) -> None:
    page = on.open()
    timeline = panel(page, "Timeline")
    on.generate("Hello there", tokens=40)
    on.post("phase", phase="io_wait")
    expect(page.locator(".span.tier-host")).to_be_visible()
    usage = on.generate(" and", tokens=2)["usage"]
    expect(timeline.get_by_role("listitem").filter(has_text="2 tokens generated")).to_contain_text(
        re.compile(r"queue .*s, restore .*s, prefill .*s")
    )
    timeline.get_by_text("As a table").click()
    table = timeline.get_by_role("table")
    expect(table).to_contain_text("Phase io_wait")
    expect(table).to_contain_text("KV in host memory")
    expect(table).to_contain_text("left the device")
    expect(table).to_contain_text(f"2 tokens generated, {usage['cached_tokens']} of {usage['prompt_tokens']} cached")
    on.post("breakpoints", layer=1, action="pause", when={"pass": "decode"})
    position = on.generate()["checkpoint"]["first"]
    expect(timeline.get_by_role("row").filter(has_text="Paused after layer 1")).to_contain_text(f"position {position}")
    expect(timeline.locator(".pause")).to_have_attribute("title", "paused after layer 1")


def test_the_screen_is_accessible_in_both_themes_and_fits_any_window(on: OnSession) -> None:
    on.post("breakpoints", layer=1, action="pause", when={"pass": "decode"})
    page = on.open()
    on.generate("Hello\nthere", tokens=40)
    page.get_by_label("Show tokens").check()
    page.get_by_text("More", exact=True).click()
    page.get_by_text("As a table").click()
    expect(page.get_by_role("region", name="Paused")).to_be_visible()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect_no_violations(page)


def test_the_server_is_away_and_nothing_is_lost(on: OnSession) -> None:
    page = on.open(refusals=True)
    text, send = page.get_by_label("Text"), page.get_by_role("button", name="Send")
    text.fill("Hello")
    page.route("**/generate", lambda route: route.abort())
    send.click()
    said = page.get_by_role("form", name="Generate").get_by_role("alert")
    expect(said).to_contain_text("The server is away.")
    page.route("**/version", lambda route: route.abort())
    for seen in ("hidden", "visible"):
        page.evaluate(SEE, seen)
    expect(send).to_be_disabled()
    expect(panel(page, "Actions").get_by_role("button", name="Fork")).to_have_attribute("title", "The server is away.")
    page.unroute("**/version")
    expect(send).to_be_enabled()
    expect(said).to_have_count(0)
    expect(text).to_have_value("Hello")
