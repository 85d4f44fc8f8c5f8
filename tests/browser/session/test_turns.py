"""The composer of a session's screen: turns that are sent, refused, cancelled, resumed, broken off and lost."""

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import SEE, anew, wait_until
from tests.browser.session.conftest import LONG, OnSession, ignore_the_end, panel, send, send_to_the_end, write
from tests.processes import serve_process

pytestmark = pytest.mark.browser


def test_a_prompt_is_sent_and_the_next_turn_goes_on_from_it(on: OnSession) -> None:
    page = on.open()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_have_text(re.compile("write what comes next"))
    assert on.view()["tokens"] == 0
    send_to_the_end(page, "Hello", **{"Most tokens": "7"})
    view = on.wait_until(tokens=13, state="idle")
    assert view["usage"]["completion_tokens"] == 7
    assert on.history()["text"].startswith("<bos>Hello")
    expect(page.locator(".token")).to_have_count(13)
    expect(page.locator(".token.generated[title$=' %']")).to_have_count(7)
    expect(page.get_by_label("Text")).to_have_value("")
    before = on.history()["token_ids"]
    page.get_by_label("Go on", exact=True).check()
    expect(page.get_by_label("Text")).to_be_disabled()
    page.get_by_label("Most tokens").fill("2")
    page.get_by_role("button", name="Send").click()
    on.wait_until(tokens=15, state="idle")
    assert on.history()["token_ids"][:13] == before


def test_tokens_appear_while_the_turn_runs_and_a_session_that_is_closed_is_gone(on_roomy: OnSession) -> None:
    page = on_roomy.open(refusals=True)
    write(page, "Hello", **{"Most tokens": str(LONG)})
    ignore_the_end(page)
    page.get_by_label("Text").press("Control+Enter")
    expect(page.locator(".token.generated").nth(5)).to_be_visible()
    assert on_roomy.view()["state"] == "running"
    fork = page.get_by_role("button", name="Fork")
    expect(page.get_by_role("button", name="Park")).to_be_disabled()
    expect(fork).to_have_attribute("title", "Its turn is running: wait, or cancel it")
    page.get_by_role("button", name="Cancel the turn").click()
    view = on_roomy.wait_until(state="idle")
    expect(fork).to_be_enabled()
    expect(page.locator(".token").last).to_have_attribute("data-position", str(view["tokens"] - 1))
    assert view["tokens"] < LONG
    send(page, " and", **{"Most tokens": str(LONG)})
    expect(page.get_by_role("button", name="Cancel the turn")).to_be_visible()
    on_roomy.api.delete(f"/v1/sessions/{on_roomy.id}").raise_for_status()
    expect(page.get_by_role("heading", name=re.compile("There is no such session|is closed"))).to_be_visible()


def test_a_chat_message_has_a_role_and_other_fields_go_as_they_are(on: OnSession) -> None:
    page = on.open(writes="Chat message")
    page.reload()
    expect(page.get_by_label("Chat message")).to_be_checked()
    page.get_by_label("Role").select_option("system")
    send(page, "Be brief", **{"Most tokens": "0"})
    on.wait_until(state="idle", phase="compute")
    expect(page.get_by_label("Text")).to_have_value("")
    text = on.history()["text"]
    assert "system" in text
    assert "Be brief" in text
    page.get_by_label("Prompt", exact=True).check()
    page.get_by_text("More", exact=True).click()
    send(page, "Hello", **{"Most tokens": "6", "Other fields, as JSON": '{"structured_outputs": {"choice": ["yes"]}}'})
    expect(page.get_by_label("Text")).to_have_value("")
    assert on.history()["text"].endswith("Helloyes")


WRONG = [
    ("Temperature", "-1", "temperature: a number from 0 to 100; got -1"),
    ("Most tokens", "many", "max_tokens: "),
    ("Seed", "9223372036854775807", "seed: this page sends integers up to 9007199254740991"),
    ("Other fields, as JSON", "[1]", "other fields: a JSON object"),
    ("Top p", "2", "top_p: "),
]


def test_what_is_wrong_is_said_beside_its_field(on: OnSession) -> None:
    page = on.open(refusals=True)
    page.get_by_text("More", exact=True).click()
    for label, value, message in WRONG:
        send(page, "Hello", **{label: value})
        field = page.get_by_label(label, exact=True)
        expect(field).to_have_accessible_description(re.compile(re.escape(message)))
        expect(page.locator("[aria-invalid]")).to_have_count(1)
        field.fill("")
        expect(page.locator("[aria-invalid]")).to_have_count(0)
    write(page, "Hello", **{"Min p": "2"})
    page.get_by_text("More", exact=True).click()
    expect(page.get_by_label("Min p")).to_be_hidden()
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Min p")).to_be_visible()  # though it was folded away
    send(page, "Hello", **{"Min p": "", "Other fields, as JSON": '{"nope": 1}'})
    expect(page.get_by_role("alert")).to_contain_text("nope")
    expect(page.get_by_label("Other fields, as JSON")).to_be_visible()
    expect(page.get_by_label("Text")).to_have_value("Hello")
    assert on.view()["tokens"] == 0
    other = on.api.post("/v1/sessions", json={}).raise_for_status().json()["id"]
    send(page, "Hello", Temperature="-1", **{"Other fields, as JSON": ""})
    field = page.get_by_label("Temperature", exact=True)
    expect(field).to_have_attribute("aria-invalid", "true")
    for session, wrong in ((other, 0), (on.id, 1)):
        page.evaluate("id => { location.hash = `#/sessions/${id}`; }", session)
        expect(page.get_by_role("heading", level=1)).to_have_attribute("title", session)
        if session == other:
            field.fill("1")  # which hides nothing of the first
        expect(page.locator("[aria-invalid]")).to_have_count(wrong)


def test_a_paused_turn_says_so_and_is_resumed(on: OnSession) -> None:
    on.post("breakpoints", layer=2, action="pause", when={"pass": "decode"})
    page = on.open()
    expect(page.get_by_role("button", name="Resume to the end")).to_be_disabled()
    send_to_the_end(page, "Hello", **{"Most tokens": "5"})
    banner = page.get_by_role("region", name="Paused")
    expect(banner).to_contain_text("Paused after layer 2 of 3, at position 6 (decode)")
    expect(banner.get_by_role("link")).to_have_attribute("href", f"#/sessions/{on.id}/model")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    page.get_by_role("button", name="Resume to the next breakpoint").click()
    expect(banner).to_contain_text("at position 7")
    page.locator(".token").nth(3).click()
    rewind = page.get_by_role("button", name="Rewind to here")
    expect(rewind).to_have_attribute("title", "Its turn is paused: only a session without a turn can be rewound")
    expect(page.locator(".token.generated")).to_have_count(2)
    assert on.view()["checkpoint"]["first"] == 7
    banner.get_by_role("link").click()
    said = page.get_by_role("region", name="Turn", exact=True).locator(".said")
    expect(said.locator(".dim")).to_have_count(0)
    assert on.history()["text"] == f"<bos>Hello{said.text_content()}"
    page.go_back()
    page.get_by_role("button", name="Resume to the end").click()
    on.wait_until(state="idle", tokens=11)
    expect(banner).to_be_hidden()
    expect(page.locator(".token")).to_have_count(11)


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
    refusal, seen = {"error": {"message": "too many calls", "param": None}}, list[Route]()

    def break_off(route: Route) -> None:
        """The first time it is refused. One handler for both: to remove one may lose what the page asks meanwhile."""
        seen.append(route)
        route.fulfill(status=429, json=refusal) if len(seen) == 1 else route.fulfill(content_type="text/event-stream")

    page.route("**/resume", break_off)
    page.get_by_role("button", name="Resume to the end").click()
    expect(page.get_by_role("alert")).to_have_text("too many calls")
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
    seen: list[Route] = []

    def generate(route: Route) -> None:
        """The first turn breaks off, the second is lost. To remove a handler may lose what the page asks meanwhile."""
        seen.append(route)
        if len(seen) == 1:
            page.route(view, lambda call: call.abort())
            text = route.fetch().text()
            route.fulfill(body=text.rpartition("event: ")[0], content_type="text/event-stream")
        elif len(seen) == 2:
            on.generate("Something else")
            route.abort()
        else:
            route.continue_()

    page.route("**/generate", generate)
    send, alert = page.get_by_role("button", name="Send"), page.get_by_role("alert")
    send_to_the_end(page, "Hello")
    expect(alert).to_have_text("The server went away during the turn.")
    expect(send).to_be_disabled()  # it would be sent twice, maybe
    page.unroute(view)
    expect(alert).to_have_text("The server went away during the turn. The session has the prompt.")
    expect(page.get_by_label("Text")).to_have_value("")
    expect(page.locator(".token")).to_have_count(10)
    write(page, "Once more")
    send.click()
    expect(alert).to_have_text("The server is away.")
    expect(send).to_be_enabled()
    expect(page.get_by_label("Text")).to_have_value("Once more")
    send.click()
    expect(alert).to_have_count(0)
    expect(page.get_by_label("Text")).to_have_value("")  # the session has the prompt
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
    # Another alert says that the server is away, as soon as the page has noticed that by itself.
    expect(page.get_by_role("alert").filter(has_text="turn")).to_have_text("The server went away during the turn.")
    with serve_process(tmp_path / "state", *flags, "--port", port):
        lost = rf"Lost with it: \d+ tokens\. Kept: {kept} tokens\.\s*$"
        expect(page.get_by_role("alert").filter(has_text="Lost")).to_have_text(re.compile(lost))
        expect(page.get_by_label("Text")).to_have_value("Once more")
        page.goto("about:blank")
