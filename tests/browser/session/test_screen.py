"""A session's screen: its tokens, figures, breakpoints, forks and timeline, and their buttons."""

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import SEE, drop, expect_no_violations
from tests.browser.session.conftest import GREEDY, LONG, OnSession, panel

pytestmark = pytest.mark.browser

MOST_DRAWN = 2000


def tokens(page: Page, kind: str = "") -> list[str]:
    """The texts of the drawn tokens of a kind, in their order."""
    return page.locator(f".token{kind}").all_text_contents()


def test_each_token_is_drawn_where_it_begins_and_the_keyboard_walks_and_rewinds(on: OnSession) -> None:
    on.post("generate", prompt="Hi\nyou", max_tokens=0)
    page = on.open()
    expect(page.locator(".token")).to_have_count(7)
    assert tokens(page) == ["<bos>", "H", "i", "↵\n", "y", "o", "u"]
    assert tokens(page, ".special") == ["<bos>"]
    page.get_by_label("Show tokens").check()
    expect(page.locator(".boundaries .token")).to_have_count(7)
    conversation = panel(page, "Conversation")
    page.locator(".token").nth(2).hover()
    expect(conversation).to_contain_text('Position 2 · id 105 · text "i"')
    page.mouse.move(0, 0)
    before = on.history()["token_ids"]
    group = conversation.get_by_role("group")
    group.press("ArrowLeft")
    expect(conversation).to_contain_text("Position 6")
    group.press("Home")
    group.press("ArrowRight")
    group.press("ArrowRight")
    expect(conversation).to_contain_text("Position 2")
    group.press("Enter")
    expect(page.get_by_role("button", name="Rewind to here")).to_be_focused()
    for _ in range(20):  # closing a dialog must not close the next one
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("Rewind to position 2?")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Rewind to here")).to_be_focused()
    assert on.history()["token_ids"] == before
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Drop 5 tokens").press("Enter")
    on.wait_until(tokens=2)
    expect(page.locator(".token")).to_have_count(2)
    assert on.history()["token_ids"] == before[:2]


def test_what_another_client_does_is_seen(on: OnSession) -> None:
    page = on.open()
    expect(page.get_by_text("Nothing yet")).to_be_visible()
    on.generate(tokens=5)
    expect(page.locator(".token")).to_have_count(11)
    expect(page.locator(".token.generated")).to_have_count(5)
    on.post("rewind", to_token=0)
    expect(page.locator(".token")).to_have_count(0)
    on.generate("Hello", tokens=45)
    expect(page.locator(".token.generated")).to_have_count(45)
    usage = on.generate(" and", tokens=2)["usage"]
    assert usage["cached_tokens"] > 0
    expect(page.locator(".token.cached")).to_have_count(usage["cached_tokens"])
    expect(panel(page, "Conversation").get_by_role("list")).to_contain_text("cached in the last turn")
    on.post("rewind", to_token=3)
    expect(page.locator(".token")).to_have_count(3)


def test_a_long_history_is_drawn_in_part(on_roomy: OnSession) -> None:
    length = 7000
    on_roomy.post("generate", token_ids=[100 + n % 20 for n in range(length)], max_tokens=0)
    page = on_roomy.open()
    drawn = page.locator(".token")
    expect(drawn.last).to_have_attribute("data-position", str(length - 1))
    assert drawn.count() <= MOST_DRAWN
    page.get_by_role("button", name="Earlier tokens").click()
    expect(page.locator(".token[data-position='4500']")).to_have_count(1)
    page.get_by_role("button", name="From the first").click()
    expect(drawn.first).to_have_attribute("data-position", "0")
    page.get_by_role("button", name="Later tokens").click()
    expect(page.locator(".token[data-position='2500']")).to_have_count(1)
    page.get_by_role("button", name="To the last").click()
    expect(drawn.last).to_have_attribute("data-position", str(length - 1))
    panel(page, "Conversation").get_by_role("group").press("Home")
    expect(page.locator(".token.chosen")).to_have_attribute("data-position", "0")
    assert drawn.count() <= MOST_DRAWN


def sessions(on: OnSession) -> set[str]:
    data = on.api.get("/v1/sessions", params={"limit": 100}).raise_for_status().json()["data"]
    return {view["id"] for view in data}


def test_parking_moves_the_kv_away_and_calling_back_brings_it(on: OnSession) -> None:
    on.generate("Hello there", tokens=40)
    page = on.open()
    field = page.get_by_label("back in")
    field.fill("soon")
    page.get_by_role("button", name="Park").click()
    expect(field).to_have_accessible_description("back in: a number of seconds from 0 to 86400; got soon")
    assert on.view()["phase"] == "compute"
    field.fill("3600")
    page.get_by_role("button", name="Park").click()
    on.wait_until(phase="io_wait")
    expect(field).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("list", name="Messages")).to_contain_text("Session tester has phase io_wait: ")
    expect(page.get_by_role("heading", level=1).locator("..")).to_contain_text("KV in host memory")
    view = on.view()
    assert view["kv"]["tier"] == "host"
    page.get_by_role("button", name="Call back").click()
    on.wait_until(phase="ready")
    expect(page.get_by_role("heading", level=1).locator("..")).to_contain_text("KV on the device")
    page.get_by_role("button", name="Mark idle").click()
    on.wait_until(phase="idle")


def test_a_fork_opens_beside_its_origin_and_closing_leads_to_all_sessions(on: OnSession) -> None:
    on.generate()
    page = on.open()
    page.get_by_role("button", name="Fork").click()
    expect(page).not_to_have_url(re.compile(on.id))
    child = page.url.split("/")[-1]
    assert on.api.get(f"/v1/sessions/{child}/history").json() == on.history()
    page.get_by_role("button", name="Close", exact=True).click()
    assert child in sessions(on)
    page.get_by_role("button", name="Close the session").click()
    expect(page).to_have_url(str(on.api.base_url.join("/#/")))
    assert child not in sessions(on)


PICK = """() => {
    window.showSaveFilePicker = async ({ suggestedName }) =>
        (await navigator.storage.getDirectory()).getFileHandle(suggestedName, { create: true });
}"""
SAVED = """async (name) => {
    const file = await (await (await navigator.storage.getDirectory()).getFileHandle(name)).getFile();
    return [...new Uint8Array(await file.arrayBuffer())];
}"""


def test_an_export_is_the_files_content(on: OnSession, tmp_path: Path) -> None:
    on.generate()
    page = on.open()
    page.evaluate("delete window.showSaveFilePicker")
    export = page.get_by_role("button", name="Export", exact=True)
    with page.expect_download() as waiting:
        export.click()
    assert waiting.value.suggested_filename == f"{on.id}.safetensors"
    waiting.value.save_as(tmp_path / "session")
    messages = page.get_by_role("list", name="Messages").get_by_role("listitem")
    expect(messages).to_contain_text([f"is saved as {on.id}.safetensors"])
    expect_same(on, (tmp_path / "session").read_bytes())
    page.get_by_role("button", name="Close this message").click()
    page.evaluate(PICK)
    export.click()
    expect(messages).to_contain_text([f"Session tester is saved as {on.id}.safetensors: "])
    expect_same(on, bytes(page.evaluate(SAVED, f"{on.id}.safetensors")))
    page.route("**/export", lambda route: None)  # no answer
    export.click()
    expect(export).to_be_disabled()
    page.get_by_role("button", name="Park").click()  # which does not wait for it
    on.wait_until(phase="io_wait")


def expect_same(on: OnSession, file: bytes) -> None:
    """An exported file holds the session's history."""
    imported = on.api.post("/v1/sessions/import", content=file).raise_for_status().json()
    assert on.api.get(f"/v1/sessions/{imported['id']}/history").json() == on.history()


def test_a_file_that_is_dropped_opens_a_session_beside_this_one(on: OnSession) -> None:
    on.generate()
    page = on.open(refusals=True)
    before, alert = sessions(on), panel(page, "Actions").get_by_role("alert")
    for content, names, says in ((b"a letter", ("one",), "the import failed"), (b"", ("one", "two"), "not 2")):
        drop(page, content, *names)
        expect(alert).to_contain_text(says)
    assert sessions(on) == before
    drop(page, on.api.get(f"/v1/sessions/{on.id}/export").content, "session.safetensors")
    expect(page).not_to_have_url(re.compile(on.id))
    (dropped,) = sessions(on) - before
    assert on.api.get(f"/v1/sessions/{dropped}/history").json() == on.history()


def fact(page: Page, name: str) -> str:
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
    held = page.get_by_role("list", name="KV by place").locator(".number").first
    body = {"prompt": "Hello", "max_tokens": LONG, **GREEDY, "stream": True}
    with on_roomy.api.stream("POST", f"/v1/sessions/{on_roomy.id}/generate", json=body) as turn:
        answer = turn.iter_lines()
        next(answer)
        expect(held).not_to_have_text("0 B")
        expect(count).not_to_have_text(re.compile("^[0-9]? tokens?$"))
        tokens, kv = count.inner_text(), held.inner_text()
        expect(count).not_to_have_text(tokens)
        expect(held).not_to_have_text(kv)
        expect(page.locator(".token").nth(50)).to_be_visible()
        assert on_roomy.view()["state"] == "running"
        on_roomy.post("cancel")
    expect(page.locator(".token").last).to_have_attribute("data-position", str(on_roomy.view()["tokens"] - 1))


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
    expect(tree.locator("li li li")).to_contain_text(re.compile(r"no turn\s*3 tokens · forked at 3"))
    tree.get_by_role("link").last.click()
    expect(page).to_have_url(re.compile(grandchild))
    expect(tree.locator("[aria-current=true]")).to_have_attribute("href", f"#/sessions/{grandchild}")
    on.api.delete(f"/v1/sessions/{child}")
    expect(tree.get_by_role("link")).to_have_count(1)
    expect(tree).to_contain_text("which is closed, at 3")


def test_the_timeline_tells_what_a_turn_waited_for_and_where_it_paused_also_after_a_reload(on: OnSession) -> None:
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
    pauses = timeline.locator(".span.state-paused")
    waits, spans = timeline.locator(".parts"), timeline.locator(".lane", has_text="Turn").locator(".decode")
    before = waits.all_text_contents()
    page.reload()
    expect(waits).to_have_text(before)
    expect(spans).to_have_count(len(before) + 1)  # the one that is paused has no waits yet
    expect(pauses).to_have_attribute("title", re.compile("^paused after layer 1"))
    on.post("cancel")
    for known in (page, on.open()):
        timeline = panel(known, "Timeline")
        expect(timeline.locator(".lane", has_text="Turn").locator(".decode")).to_have_count(3)
        expect(timeline.locator(".parts")).to_have_count(3)
        timeline.get_by_text("As a table").click()
        for text in ("Phase io_wait", "KV in host memory", "Paused after layer 1"):
            expect(timeline.get_by_role("row").filter(has_text=text)).to_have_count(1)
        expect(timeline.get_by_role("row").filter(has_text="Turn finished")).to_have_count(3)
        expect(timeline.get_by_role("table")).to_contain_text(
            f"2 tokens generated, {usage['cached_tokens']} of {usage['prompt_tokens']} cached"
        )


def test_what_was_looked_up_of_the_past_stays_when_turns_are_told(on: OnSession) -> None:
    for phase in ("io_wait", "ready") * 101:
        on.post("phase", phase=phase)
    timeline = panel(on.open(), "Timeline")
    timeline.get_by_text("As a table").click()
    timeline.get_by_role("button", name="Earlier").click()
    expect(timeline.get_by_role("row").filter(has_text="Opened")).to_have_count(1)
    on.generate()
    for text in ("Turn finished", "Opened"):
        expect(timeline.get_by_role("row").filter(has_text=text)).to_have_count(1)


def test_the_screen_is_accessible_in_both_themes_and_fits_any_window(on: OnSession) -> None:
    on.post("breakpoints", layer=1, action="pause", when={"pass": "decode"})
    page = on.open()
    on.generate("Hello\nthere", tokens=40)
    page.get_by_label("Show tokens").check()
    page.get_by_text("More", exact=True).click()
    page.get_by_text("As a table").click()
    expect(page.get_by_role("region", name="Paused")).to_be_visible()
    for width in (400, 1280, 3840):
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
