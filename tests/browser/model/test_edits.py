"""Inside the model: edits at the pause, and forks that are compared."""

import math
import re

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import eventually
from tests.browser.model.conftest import Inside

pytestmark = pytest.mark.browser


def test_an_edit_is_shown_before_and_after_and_can_be_undone(inside: Inside) -> None:
    inside.pause_at(1)
    original = inside.activation()
    before = inside.get(f"{inside.path}/checkpoint/lens")["positions"][0]
    factor = inside.page.get_by_label("Factor", exact=True)
    factor.fill("-3")
    inside.button("Try it").click()
    tables = inside.page.get_by_role("region", name="Edit after layer 1").get_by_role("table")
    expect(tables).to_have_count(4)
    after = inside.get(f"{inside.path}/checkpoint/lens")["positions"][0]
    once = inside.activation()
    assert once != original
    for table, lens in ((tables.nth(0), before), (tables.nth(1), after)):
        expect(table).to_contain_text(f"position {lens['position']}")
        share = 100 * math.exp(lens["top"][0]["logprob"])
        expect(table.get_by_role("row").first).to_contain_text(re.compile(rf"{share:.0f}|{share:.1f}"))
    factor.fill("0.25")  # each preview begins from the first state
    factor.press("Tab")
    eventually(lambda: inside.activation() != once, wanted=True)
    expect(inside.button("Undo")).to_be_enabled()
    factor.fill("-3")
    factor.press("Tab")
    eventually(lambda: inside.activation() == once, wanted=True)
    expect(inside.button("Undo")).to_be_enabled()
    inside.button("Undo").click()
    expect(tables).to_have_count(0)
    assert inside.activation() == original


def test_a_preview_shows_what_would_be_said_and_the_smallest_change(inside: Inside) -> None:
    inside.pause_at(1)
    sessions = {each["id"] for each in inside.get("/v1/sessions?limit=100")["data"]}
    inside.cell(1, 0).click()
    inside.button("Try it").click()  # a scale at the last position, which the lens after this layer does not show
    with_edit = inside.page.get_by_role("table", name="Last layer, with the edit")
    expect(with_edit).to_be_visible()
    assert {each["id"] for each in inside.get("/v1/sessions?limit=100")["data"]} == sessions
    fork = inside.post(f"{inside.path}/fork", {})["id"]  # with the edit, as the session stands now
    inside.post(f"/v1/sessions/{fork}/resume", {"until": {"layer": inside.layers - 1}})
    top = inside.get(f"/v1/sessions/{fork}/checkpoint/lens?top_k=8")["positions"][0]["top"]
    for row, token in zip(with_edit.get_by_role("row").all(), top, strict=True):
        share = 100 * math.exp(token["logprob"])
        expect(row.get_by_role("cell").nth(1)).to_have_text(f"{share:.1f} %" if share < 10 else f"{share:.0f} %")
    inside.call("DELETE", f"/v1/sessions/{fork}")
    after = inside.page.get_by_role("table", name="After")
    expect(after).to_contain_text(f"position {inside.view['checkpoint']['end'] - 1}")
    changes = [row.get_by_role("cell").nth(2).text_content() for row in after.get_by_role("row").all()]
    assert set(changes) <= {"no change", "< 0.05 points"}


def test_what_is_wrong_with_an_edit_is_told_beside_its_field(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    inside.pause_at(1)
    factor, positions = (inside.page.get_by_label(name, exact=True) for name in ("Factor", "Positions"))
    inside.page.get_by_label("Factor, slider").press("ArrowRight")
    expect(factor).to_have_value("0.95")
    for text, told in (("1e30", "a number from -1000000 to 1000000; got 1e+30"), ("", "enter a number")):
        factor.fill(text)
        inside.button("Try it").click()
        expect(factor).to_have_accessible_description(told)
        expect(factor).to_have_value(text)
    factor.fill("0.5")
    expect(factor).to_have_accessible_description("")
    positions.select_option("a range")
    inside.button("Try it").click()
    expect(positions).to_have_accessible_description("enter the first one, and the one after the last")
    inside.page.get_by_label("First position").fill("3")
    inside.page.get_by_label("End of the positions, not included").fill("2")
    inside.button("Try it").click()
    expect(positions).to_have_accessible_description(re.compile("the first position must be lower than the end"))


def test_an_edit_of_another_client_is_in_the_map_and_one_can_be_armed_for_the_tokens_to_come(inside: Inside) -> None:
    inside.pause_at(1)
    cell = inside.cell(1, inside.view["checkpoint"]["end"] - 1)
    expect(cell).not_to_have_text("")
    before, shown = inside.get(f"{inside.path}/checkpoint/lens")["positions"][0]["top"][0], cell.inner_text()
    inside.post(f"{inside.path}/checkpoint/edit", {"edits": [{"op": "scale", "factor": -3}]})
    assert inside.get(f"{inside.path}/checkpoint/lens")["positions"][0]["top"][0]["token_id"] != before["token_id"]
    expect(cell).not_to_have_text(shown)
    inside.page.get_by_label("Operation").select_option("ablate")
    inside.button("Steer from here on").click()
    eventually(lambda: [each["layers"] for each in inside.breakpoints("edit")], [[1]])
    assert inside.breakpoints("edit")[0]["edits"][0]["op"] == "ablate"
    expect(inside.rung(1)).to_have_accessible_name(re.compile("edits"))
    inside.button("Remove edit after layer 1 (ablate)").click()
    expect(inside.rung(1)).not_to_have_accessible_name(re.compile("edits"))
    assert not inside.breakpoints("edit")


def test_a_fork_is_compared_with_its_session(inside: Inside) -> None:
    inside.pause_at(1, tokens=8)
    length = inside.view["checkpoint"]["end"]
    inside.page.get_by_label("Operation").select_option("ablate")
    inside.page.get_by_label("Positions", exact=True).select_option("all")
    inside.button("Fork and compare").click()
    panel = inside.page.get_by_role("region", name="Fork and compare")
    expect(panel.get_by_role("status")).to_have_text("The first token that differs is marked.")
    links = [link.get_attribute("href") or "" for link in panel.get_by_role("link").all()]
    ids = [link.removeprefix("#/sessions/") for link in links]
    assert ids[0] == inside.id
    histories = [inside.get(f"/v1/sessions/{each}/history") for each in ids]
    same, prompt = inside.post("/v1/sessions", {})["id"], histories[0]["token_ids"][:length]
    turn = {"token_ids": prompt, "max_tokens": 8, "temperature": 0}
    plain = inside.post(f"/v1/sessions/{same}/generate", turn)
    assert histories[0]["token_ids"][length:] == plain["token_ids"]
    assert histories[1]["token_ids"][:length] == prompt
    assert histories[1]["token_ids"] != histories[0]["token_ids"]
    inside.page.reload()  # the address says with which fork
    expect(panel.locator("mark")).to_have_count(2)


def test_an_edit_that_changes_nothing_gives_the_same_reply_until_the_next_turn(inside: Inside) -> None:
    inside.pause_at(1)
    inside.page.get_by_label("Factor", exact=True).fill("1")
    inside.button("Fork and compare").click()
    panel = inside.page.get_by_role("region", name="Fork and compare")
    outcome = panel.get_by_role("status")
    expect(outcome).to_have_text("Both replies are the same.")
    fork = str(panel.get_by_role("link").nth(1).get_attribute("href")).removeprefix("#/sessions/")
    inside.page.goto(inside.address(fork))
    expect(panel).to_contain_text("Both replies appear here")
    inside.page.go_back()
    expect(outcome).to_have_text("Both replies are the same.")
    expect(panel.get_by_role("article")).to_have_count(2)
    inside.pause_at(2)
    expect(panel.get_by_role("article")).to_have_count(0)
    expect(panel).to_contain_text("Both replies appear here")


def test_an_edit_can_be_undone_though_the_lens_after_it_failed(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    inside.pause_at(1)
    original, asked = inside.activation(), list[Route]()

    def refuse_second(route: Route) -> None:
        asked.append(route)
        if len(asked) == 2:
            route.fulfill(status=500, json={"error": {"message": "the lens is broken"}})
        else:
            route.continue_()

    inside.page.route(re.compile(rf"{inside.id}/checkpoint/lens\?"), refuse_second)
    inside.page.get_by_label("Factor", exact=True).fill("-3")
    inside.button("Try it").click()
    panel = inside.page.get_by_role("region", name="Edit after layer 1")
    expect(panel.get_by_role("alert")).to_have_text("the lens is broken")
    assert inside.activation() != original
    inside.button("Undo").click()
    expect(panel.get_by_role("table")).to_have_count(0)
    assert inside.activation() == original
