"""The screen of sessions: the board, the table with its filters and buttons, and sessions that are opened there."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from playwright.sync_api import APIResponse, FilePayload, Locator, Page, Route, expect

from tests.browser.conftest import OpenPage, close_all
from tests.browser.filling import drop, eventually, open_session, row, signal, wait_until
from tests.serving import serve

pytestmark = pytest.mark.browser


def cells(page: Page, session: str) -> Locator:
    return page.locator(f'.cell[data-id="{session}"]')


def test_a_session_moves_between_lanes_whose_figures_have_units(open_page: OpenPage, http: httpx.Client) -> None:
    open_page()
    page = open_page()  # hears of the tiers after a moment, as it is not the first: lanes change their widths
    device, host = (page.get_by_role("region", name=place, exact=True) for place in ("Device", "Host"))
    expect(device).to_contain_text("Empty. Open a session and send it a prompt")
    expect(host).to_contain_text(re.compile("0 B of 16 MiB.*Empty. Park a session"))
    expect(page.get_by_role("region", name="Disk")).to_contain_text("The disk keeps none")
    session = open_session(http, tokens=40, name=(wide := "\u65c5" * 30))
    cell = cells(page, session)
    expect(cell).to_have_attribute("data-tier", "device")
    expect(cell).to_have_accessible_name(re.compile(f"{wide}, phase compute; 40 tokens, .* on the device"))
    expect(cell).to_contain_text("40 tok")
    cut = "head => head.scrollWidth > head.clientWidth && getComputedStyle(head).textOverflow"
    assert cell.locator(".head").evaluate(cut) == "ellipsis"
    expect(row(page, session).get_by_text(session[-8:])).to_be_in_viewport(ratio=1)
    expect(device).not_to_contain_text("Empty.")
    expect(page.get_by_role("main")).to_contain_text(re.compile(r"48 KiB of 4\.0 MiB 1.*Weights: "))
    charts = page.get_by_role("region", name="Activity")
    expect(charts.get_by_role("img", name=re.compile("^Last hour, Device: 48 KiB owned"))).to_be_visible()
    expect(charts.get_by_role("img", name=re.compile("Queue: 0 running, .* 0 waiting"))).to_be_visible()
    signal(http, session, "io_wait")
    expect(cell).to_have_attribute("data-tier", "host")
    expect(cell).to_have_accessible_name(re.compile(f"{wide}, phase io_wait; .* on the host"))
    expect(cell).to_have_class(re.compile("parked"))

    def is_in_lane() -> bool:
        boxes: list[Any] = [host.bounding_box(), cell.bounding_box()]
        lane, drawn = boxes
        return all(0 < drawn[at] - lane[at] < lane[of] - drawn[of] for at, of in (("x", "width"), ("y", "height")))

    eventually(is_in_lane, wanted=True)
    moves = charts.get_by_role("img", name=re.compile("Moves: .* to host, .* copies run at .* MiB"))
    expect(moves).to_be_visible()
    expect(moves.locator("text").first).to_have_text("0 MiB/s")


def test_arrow_keys_go_to_cells_whose_tips_tell_what_they_hold(open_page: OpenPage, http: httpx.Client) -> None:
    on_device, on_host = (open_session(http, tokens=40, name=name, team="blue") for name in ("abo\u202eve", "below"))
    parked = {"phase": "io_wait", "resume_in_ms": 3_600_000}
    http.post(f"/v1/sessions/{on_host}/phase", json=parked).raise_for_status()
    page = open_page()
    expect(cells(page, on_host)).to_have_attribute("data-tier", "host")
    page.get_by_role("group", name="Board of sessions by place").focus()
    page.keyboard.press("ArrowDown")
    expect(cells(page, on_device)).to_be_focused()
    tip = page.get_by_role("tooltip")
    for text in (on_device, "name: abo�ve, team: blue", "40 tokens", "48 KiB on the device", "Phasecompute", "prefill"):
        expect(tip).to_contain_text(text)
    page.keyboard.press("ArrowRight")
    expect(cells(page, on_host)).to_be_focused()
    expect(tip).to_contain_text(re.compile("Returns *in (5. min|1 h)"))
    page.keyboard.press("ArrowLeft")
    cells(page, on_host).hover()
    expect(tip).to_contain_text(on_host)
    page.get_by_role("heading", name="Sessions").hover()
    expect(cells(page, on_device)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/sessions/{on_device}$"))
    page.goto("about:blank")  # before the session is closed


def test_a_thousand_sessions_are_shown_and_followed(open_page: OpenPage) -> None:
    with serve(kv_device=24 << 20, kv_host=24 << 20) as url, httpx.Client(base_url=url, timeout=60) as http:
        page = open_page(url)
        with ThreadPoolExecutor(4) as pool:
            sessions = [open_session(http, tokens=4, name=f"agent-no-{at + 10}") for at in range(40)]
            expect(page.locator(".cell")).to_have_text([re.compile(f"^agent-no-{at + 10} 4 tok$") for at in range(40)])
            opened = pool.map(lambda at: open_session(http, tokens=4 * (at < 600), name=f"{at}"), range(40, 1000))
            sessions += list(opened)
        expect(page.get_by_role("main")).to_contain_text("1,000 sessions")
        more = page.get_by_role("region", name="Device", exact=True).get_by_text(re.compile(r"^\+ \d+ more$"))
        eventually(lambda: page.locator(".cell").count() + int((more.text_content() or "")[2:-5]), wanted=600)
        assert page.locator("tbody tr[data-id]").count() < 60, "only rows in view are in the document"
        for session in sessions[:100]:
            signal(http, session, "io_wait")
        expect(page.locator('.cell[data-tier="host"]')).to_have_count(100)
        page.goto("about:blank")


def rows(page: Page) -> Locator:
    return page.locator("tbody tr[data-id]")


def facet(page: Page, title: str, value: str) -> Locator:
    return page.get_by_role("group", name=title, exact=True).get_by_role("button", name=re.compile(f"^{value} "))


def test_filters_by_text_and_by_what_sessions_do(open_page: OpenPage, http: httpx.Client) -> None:
    paused, held, empty = (
        open_session(http, tokens=tokens, name=name) for tokens, name in ((9, "ada"), (9, "bob"), (0, "cyd"))
    )
    http.post(f"/v1/sessions/{paused}/breakpoints", json={"layer": 0, "action": "pause"}).raise_for_status()
    turn = {"token_ids": [7], "max_tokens": 1}
    assert http.post(f"/v1/sessions/{paused}/generate", json=turn).json()["status"] == "paused"
    page = open_page()
    expect(rows(page)).to_have_count(3)
    for title, value, shown in (("Turn", "paused", paused), ("Place", "none", empty)):
        expect(facet(page, title, value)).to_have_text(re.compile("1$"))
        facet(page, title, value).click()
        expect(rows(page)).to_contain_text([shown[-8:]])
        facet(page, title, value).click()
    page.get_by_label("Find an id or a tag").fill("BOB")
    expect(rows(page)).to_contain_text([held[-8:]])
    expect(facet(page, "Phase", "compute")).to_have_text(re.compile("1$"))
    expect(page.locator(f'.cell[data-id="{paused}"]')).to_be_disabled()
    page.get_by_label("Find an id or a tag").fill("nobody")
    expect(page.get_by_role("main")).to_contain_text("No session passes the filters")
    page.get_by_role("group", name="Filters").get_by_role("button", name="Clear the filters").click()
    expect(rows(page)).to_have_count(3)


def test_who_holds_the_most_has_the_largest_cell_and_is_one_click_away_and_no_copy_counts(
    open_page: OpenPage, http: httpx.Client
) -> None:
    sessions = [open_session(http, tokens=tokens, name=f"of {tokens}") for tokens in (992, 256, 300)]
    http.get(f"/v1/sessions/{sessions[2]}/export").raise_for_status()
    wait_until(http, sessions[2], lambda view: view["kv"]["device_bytes"] == view["kv"]["host_bytes"] > 0)
    page = open_page()
    expect(rows(page).first).to_have_attribute("data-id", sessions[2])  # the newest
    page.get_by_role("button", name="Biggest first").click()
    expect(rows(page).first).to_have_attribute("data-id", sessions[0])
    expect(rows(page).first).to_contain_text("992 KiB")
    for _ in range(2):
        page.get_by_role("button", name="Tokens", exact=True).click()
    expect(rows(page).first).to_have_attribute("data-id", sessions[1])
    expect(page.get_by_title("What they share counts once").first).to_be_visible()
    drawn = [cells(page, session).first for session in sessions]
    boxes: list[Any] = [each.bounding_box() for each in (*drawn, page.locator(".field").first)]
    largest, small, other, lane = (box["width"] * box["height"] for box in boxes)
    assert largest / small == pytest.approx(4, rel=0.25)
    assert (largest + small + other) / lane == pytest.approx(992 / 4096, rel=0.15), "they share the first tokens"
    expect(cells(page, sessions[1])).to_have_text("of 256 256 tok")
    assert page.locator(".table-frame").evaluate("frame => frame.scrollWidth <= frame.clientWidth")


def test_a_row_parks_calls_back_and_closes(open_page: OpenPage, http: httpx.Client) -> None:
    session = open_session(http, tokens=40, name="worker")
    page = open_page(refusals=True)
    expect(row(page, session).get_by_role("button")).to_have_text(["Park", "Close"])
    page.route("**/phase", lambda route: route.fulfill(status=503, json={"error": {"message": "the engine is away"}}))
    row(page, session).get_by_role("button", name="Park").click()
    expect(page.get_by_role("list", name="Messages")).to_contain_text(f"{session[-8:]}: the engine is away")
    page.unroute("**/phase")
    for action, *wanted in (("Park", "io_wait", "host"), ("Call back", "ready", "device")):
        row(page, session).get_by_role("button", name=action).click()
        wait_until(http, session, lambda view, wanted=wanted: [view["phase"], view["kv"]["tier"]] == wanted)  # type: ignore[misc]
    row(page, session).locator(".number").first.click()  # only a click beside the buttons opens the session
    expect(page.get_by_role("heading", level=1)).to_contain_text(session[-8:])
    page.go_back()
    fork = http.post(f"/v1/sessions/{session}/fork").raise_for_status().json()["id"]
    expect(row(page, fork).get_by_text("fork", exact=True)).to_be_visible()
    expect(row(page, fork).get_by_role("button", name=f"Close worker, fork {fork[-8:]}")).to_be_visible()
    expect(row(page, session).get_by_text("fork", exact=True)).to_have_count(0)
    row(page, session).get_by_role("button", name="Close worker", exact=True).click()
    asks = page.get_by_role("dialog", name="Close session worker?")
    expect(asks).to_contain_text("40 tokens")
    asks.get_by_role("button", name="Leave it").click()
    expect(asks).to_be_hidden()
    assert http.get(f"/v1/sessions/{session}").status_code == 200
    row(page, session).get_by_role("button", name="Close worker", exact=True).click()
    asks.get_by_role("button", name="Close the session").click()
    expect(row(page, session)).to_have_count(0)
    assert http.get(f"/v1/sessions/{session}").status_code == 404


def test_what_needs_a_look_comes_first_with_what_to_do(open_page: OpenPage, http: httpx.Client) -> None:
    late, soon, silent = (open_session(http, tokens=40, name=name) for name in ("late", "soon", "silent"))
    for session, ms in ((late, 1), (soon, 3_600_000)):
        http.post(f"/v1/sessions/{session}/phase", json={"phase": "io_wait", "resume_in_ms": ms}).raise_for_status()
    page = open_page()
    expect(page.get_by_role("main")).to_contain_text("3 agents, device for 85 · 0 recomputed today, worst wait")
    found = page.get_by_role("list", name="What needs a look")
    expect(found).to_contain_text(re.compile(rf"1 client later than announced: late \(…{late[-8:]}\) by \d+ (s|min)"))
    for _ in range(2):
        page.get_by_role("button", name="Returns", exact=True).click()
    expect(rows(page).first).to_have_attribute("data-id", late)
    expect(row(page, late)).to_contain_text(re.compile(r"\d+ (s|min) late"))
    expect(row(page, soon)).to_contain_text(re.compile(r"in (5\d|60) min"))
    expect(rows(page).last).to_have_attribute("data-id", silent)
    found.get_by_role("link", name="Look at it").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("late")


def test_all_that_pass_the_filters_are_parked_and_closed_together(open_page: OpenPage, http: httpx.Client) -> None:
    mine, other = [open_session(http, tokens=40, team="red") for _ in range(3)], open_session(http, team="blue")
    page = open_page(refusals=True)
    expect(page.get_by_role("main")).to_contain_text("3 agents, device for")  # one has no KV
    first, parked = f"/v1/sessions/{mine[0]}", {"phase": "io_wait", "resume_in_ms": 3_600_000}
    http.post(f"{first}/phase", json=parked).raise_for_status()
    page.goto("/#/?find=team:+red")  # in a tab that shows all
    expect(row(page, mine[0])).to_contain_text("io_wait")
    for action, phase in (("Park", "io_wait"), ("Call back", "ready")):
        page.get_by_role("button", name=f"{action} these 3").click()
        expect(rows(page).filter(has_text=phase)).to_have_count(3)
        assert (http.get(first).json()["returns_at"] is not None) == (phase == "io_wait"), "it keeps what it has said"
    page.route(f"**{first}", lambda route: (http.delete(first), route.continue_()))  # others are sooner
    page.get_by_role("button", name="Close these 3").click()
    asks = page.get_by_role("dialog", name="Close 3 sessions?")
    expect(asks).to_contain_text("Their 120 tokens")
    asks.get_by_role("button", name="Close 3 sessions").click()
    expect(rows(page)).to_have_count(0)
    assert [view["id"] for view in http.get("/v1/sessions").json()["data"]] == [other]


def test_groups_fold_and_park_and_an_address_keeps_the_looks(open_page: OpenPage, http: httpx.Client) -> None:
    blue, _ = ([open_session(http, tokens=40, team=team) for _ in range(2)] for team in ("blue", "red"))
    alone = open_session(http)
    page = open_page()
    page.get_by_label("Group by").select_option("team")
    heads, roomy = page.locator("tr.group"), page.get_by_role("button", name="Roomy")
    expect(heads).to_contain_text(["blue 2 sessions · 96 KiB", "red 2 sessions · 96 KiB", "no team 1 session · 0 B"])
    heads.nth(1).get_by_role("button", name="red").first.click()
    expect(rows(page)).to_have_count(3)
    page.get_by_role("button", name="Park these 2 of blue").click()
    for session in blue:
        wait_until(http, session, lambda view: view["phase"] == "io_wait")
    low: Any = row(page, alone).bounding_box()
    roomy.click()
    eventually(lambda: (row(page, alone).bounding_box() or low)["height"] > 1.2 * low["height"], wanted=True)
    page.reload()
    expect(roomy).to_have_attribute("aria-pressed", "true")
    expect(heads).to_have_count(3)
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Name").fill("by phase")
    page.keyboard.press("Enter")
    expect(heads).to_contain_text(["compute 3 sessions · 64 KiB", re.compile("io_wait 2 .* (64|96) KiB")])


def test_a_session_is_opened_with_labels(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page(refusals=True)
    form = page.get_by_role("dialog", name="New session")
    labels, done = form.get_by_label("Metadata"), form.get_by_role("button", name="Open the session")
    for typed, told in ((f"{'n' * 65}: ada", "64"), ("name: ada\nno colon", '"no colon" has no "name: value"')):
        page.get_by_role("button", name="New session").click()
        labels.fill(typed)
        done.click()
        expect(form.get_by_role("alert")).to_contain_text(told)
        expect(labels).to_have_value(typed)
        form.get_by_role("button", name="Cancel").click()
        expect(form).to_be_hidden()
        assert http.get("/v1/sessions").json()["data"] == []
    page.get_by_role("button", name="New session").click()
    labels.fill("name: ada\nteam: <b>blue</b>")
    done.click()
    expect(page).to_have_url(re.compile("#/sessions/ses_"))
    opened = http.get(f"/v1/sessions/{page.url.rpartition('/')[2]}").json()
    assert opened["metadata"] == {"name": "ada", "team": "<b>blue</b>"}
    page.get_by_role("link", name="Sessions", exact=True).click()
    expect(page.get_by_role("region", name="Table of sessions")).to_contain_text("team: <b>blue</b>")


def test_a_session_that_is_closed_before_its_answer_comes_is_not_there(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page()
    expect(page.get_by_role("main")).to_contain_text("No session is open.")
    held: list[tuple[Route, APIResponse]] = []
    page.route("**/v1/sessions", lambda route: held.append((route, route.fetch())))
    page.get_by_role("button", name="New session").click()
    page.get_by_role("button", name="Open the session").click()
    expect(page.locator("tbody tr[data-id]")).to_have_count(1)
    close_all(http)
    expect(page.locator("tbody tr[data-id]")).to_have_count(0)
    route, answer = held[0]
    route.fulfill(response=answer)
    expect(page.get_by_role("heading", name="is closed")).to_be_visible()
    page.get_by_text("As a table").click()
    expect(page.get_by_role("region", name="Timeline")).to_contain_text(re.compile("Closed.*Opened"))
    page.get_by_role("link", name="Sessions", exact=True).click()
    expect(page.get_by_role("main")).to_contain_text("No session is open.")


def test_an_exported_file_is_dropped_and_one_that_is_none_says_so(open_page: OpenPage, http: httpx.Client) -> None:
    session = open_session(http, tokens=40, name="emigrant")
    exported = http.get(f"/v1/sessions/{session}/export").content
    http.delete(f"/v1/sessions/{session}").raise_for_status()
    page = open_page(refusals=True)
    file = FilePayload(name="holiday.safetensors", mimeType="image/jpeg", buffer=b"not a session at all")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import a file").click()
    chooser.value.set_files(file)
    imports = page.get_by_role("list", name="Imports")
    expect(imports).to_contain_text("holiday.safetensors (20 B)")
    expect(imports.get_by_role("alert")).not_to_be_empty()
    imports.get_by_role("button", name="Try again").click()
    expect(imports.get_by_role("alert")).not_to_be_empty()
    imports.get_by_role("button", name="Forget the import of holiday.safetensors").click()
    expect(imports.get_by_role("listitem")).to_have_count(0)
    assert http.get("/v1/sessions").json()["data"] == []
    drop(page, exported, "emigrant.safetensors")
    imports.get_by_role("link").click()
    expect(page).to_have_url(re.compile("#/sessions/ses_"))
    [arrived] = http.get("/v1/sessions").json()["data"]
    assert page.url.endswith(arrived["id"])
    assert (arrived["tokens"], arrived["metadata"]) == (40, {"name": "emigrant"})
