"""Inside the model: the lens as a heatmap follows histories that are cut, edits that come between, and the eyes."""

import math
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import APIResponse, Route, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import eventually
from tests.browser.model.conftest import Inside

pytestmark = pytest.mark.browser


def visible(text: str) -> str:
    """As the page shows a token: lib/tokens.js."""
    shown = re.sub(r"\r\n|\r|\n", "↵", text).replace("\t", "⇥")
    shown = re.sub(r"[\x00-\x1f]", lambda found: chr(0x2400 + ord(found[0])), shown).replace("\x7f", "␡")
    return re.sub(r"^ +| +$", lambda found: "·" * len(found[0]), shown) or "∅"


def test_the_last_layer_says_what_the_turn_then_says(inside: Inside) -> None:
    last = inside.layers - 1
    inside.pause_at(last, tokens=1)
    position = inside.view["checkpoint"]["end"] - 1
    expect(inside.cell(last, position)).not_to_be_empty()
    shown = inside.cell(last, position).text_content()
    inside.button("To the end").click()
    inside.expect_idle()
    said = inside.get(f"{inside.path}/history")["token_ids"][position + 1]
    assert shown == visible(inside.post("/detokenize", {"tokens": [said]})["prompt"])


def test_one_click_from_an_empty_server_leads_to_the_answer(http: httpx.Client, open_page: OpenPage) -> None:
    page = open_page("/")
    page.get_by_role("button", name="Look inside the model").click()
    expect(page.get_by_role("status").filter(has_text="paused after layer 3 of 3")).to_be_visible()
    [view] = http.get("/v1/sessions").json()["data"]
    position = view["checkpoint"]["end"] - 1
    told = page.get_by_label("The chosen cell").get_by_role("status")
    expect(told).to_contain_text(f"Layer 3, position {position}, after")
    expect(page.locator(f"#cell-3-{position}")).not_to_be_empty()
    assert view["metadata"] == {"name": "The Eiffel Tower"}


def test_a_step_fills_in_the_next_layer_and_clearing_forgets_what_was(inside: Inside) -> None:
    inside.pause_at(0)
    expect(inside.cell(0, inside.view["checkpoint"]["end"] - 1)).not_to_be_empty()
    expect(inside.cell(1, 4)).to_be_empty()
    inside.button("Next layer").click()
    expect(inside.cell(1, 4)).not_to_be_empty()
    expect(inside.cell(2, 4)).to_be_empty()
    inside.button("Clear the map").click()
    expect(inside.cell(0, 4)).to_be_empty()
    assert [each["layer"] for each in inside.get(f"{inside.path}/lens?positions=3:4")["layers"]] == [1]


def test_a_cell_tells_its_tokens_and_the_path_of_one_and_arrow_keys_move_it(inside: Inside) -> None:
    bottom = inside.layers - 1
    inside.pause_at(bottom)
    last = inside.view["checkpoint"]["end"] - 1
    inside.page.get_by_role("grid").focus()
    told = inside.page.get_by_label("The chosen cell").get_by_role("status")
    expect(told).to_contain_text(f"Layer {bottom}, position {last}, after")
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        inside.page.keyboard.press(key)
    expect(told).to_contain_text(f"Layer {bottom - 1}, position {last - 1}, after")
    inside.page.keyboard.press("Home")
    expect(told).to_contain_text(f"Layer {bottom - 1}, position 0, after")
    expect(inside.page.get_by_role("grid")).to_have_attribute("aria-activedescendant", f"cell-{bottom - 1}-0")
    inside.cell(bottom, last).click()
    tops = inside.page.locator(".tops button")
    expect(tops).to_have_count(5)
    lens = inside.get(f"{inside.path}/lens?positions={last}:{last + 1}&top_k=5")
    layer = lens["layers"][-1]
    for at in range(2):
        share = 100 * math.exp(layer["logprobs"][0][at])
        expect(tops.nth(at)).to_contain_text(visible(lens["texts"][str(layer["token_ids"][0][at])]))
        expect(tops.nth(at)).to_contain_text(f"{share:.0f} %" if share >= 10 else f"{share:.1f} %")
    tops.first.click()
    pinned = layer["token_ids"][0][0]
    among = [each for each in lens["layers"] if pinned in each["token_ids"][0]]
    chart = inside.page.get_by_role("img", name=re.compile("Probability of .* by layer"))
    expect(chart.locator("circle")).to_have_count(len(among))
    tops.first.click()
    expect(chart).to_have_count(0)


LENGTH = 12


def fill(inside: Inside, first: int) -> None:
    """A history of `LENGTH` tokens that shares one with any other, by another client."""
    inside.post(f"{inside.path}/rewind", {"to_token": 0})
    tokens = [5, *range(first, first + LENGTH - 1)]
    inside.post(f"{inside.path}/generate", {"token_ids": tokens, "max_tokens": 0})


def best(lens: Any, at: int) -> str:
    """What a map says after its last layer."""
    return visible(lens["texts"][str(lens["layers"][-1]["token_ids"][at][0])])


def expect_map(inside: Inside, position: int) -> None:
    """The page shows a position as the server tells of it, at every layer."""
    lens = inside.get(f"{inside.path}/lens?positions={position}:{position + 1}")
    head = inside.page.get_by_role("columnheader").nth(position)
    expect(head.locator("b")).to_have_text(visible(lens["texts"][str(lens["token_ids"][0])]))
    assert len(lens["layers"]) == inside.layers
    for each in lens["layers"]:
        expect(inside.cell(each["layer"], position)).to_have_text(visible(lens["texts"][str(each["token_ids"][0][0])]))


def test_other_tokens_of_the_same_number_are_read_anew(inside: Inside) -> None:
    inside.page.get_by_label("Watch all layers").click()
    eventually(lambda: len(inside.breakpoints("capture")), 1)
    for first in (20, 60):
        fill(inside, first)
        expect_map(inside, 7)
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    fill(inside, 40)
    inside.page.go_back()
    expect_map(inside, 7)
    expect_map(inside, LENGTH - 1)


def test_an_edit_outdates_the_answer_that_is_under_way(inside: Inside) -> None:
    held: list[tuple[Route, APIResponse]] = []
    lens = re.compile(rf"{inside.id}/lens\?")
    inside.page.route(lens, lambda route: held.append((route, route.fetch())), times=1)
    last = inside.layers - 1
    inside.pause_at(last)
    while not held:  # the answer from before the edit
        inside.page.wait_for_timeout(10)
    position = inside.view["checkpoint"]["end"] - 1
    inside.page.get_by_label("Operation").select_option("ablate")
    inside.button("Try it").click()
    expect(inside.page.get_by_role("table", name=re.compile("After"))).to_be_visible()
    route, answer = held[0]
    now = inside.get(f"{inside.path}/lens?positions={position}:{position + 1}")
    assert best(now, 0) != best(answer.json(), -1)
    route.fulfill(response=answer)
    expect_map(inside, position)
    inside.page.route(re.compile(r"/lens\?"), lambda route: None)  # no answer
    inside.button("Fork and compare").click()  # which takes the edit back first
    expect(inside.page.get_by_role("region", name="Fork and compare").get_by_role("article")).to_have_count(2)
    expect(inside.cell(last, position)).not_to_be_empty()


def test_steps_in_a_row_keep_what_is_known_and_ask_for_the_rest(inside: Inside) -> None:
    held: list[tuple[Route, APIResponse]] = []
    lens = re.compile(rf"{inside.id}/lens\?")
    inside.page.route(lens, lambda route: held.append((route, route.fetch())))
    inside.pause_at(0)
    for layer in (1, 2):
        inside.button("Next layer").click()
        inside.expect_pause(layer)
    route, answer = held[0]
    with inside.page.expect_request(lens) as asked:
        route.fulfill(response=answer)
    expect(inside.cell(0, inside.view["checkpoint"]["end"] - 1)).not_to_be_empty()
    assert parse_qs(urlsplit(asked.value.url).query)["layers"] == [",".join(map(str, range(1, inside.layers)))]


def test_a_long_context_is_asked_for_as_it_is_scrolled_to_and_a_new_pause_moves_the_map(inside: Inside) -> None:
    asked: list[str] = []
    inside.page.on("request", lambda request: asked.append(request.url))
    inside.arm(2)
    inside.start("The quick brown fox. " * 12)
    end = inside.expect_pause(2)["end"]
    last = end - 1
    expect(inside.cell(2, last)).to_be_in_viewport()
    expect(inside.cell(2, last)).not_to_be_empty()
    expect(inside.cell(2, 0)).to_have_count(0)
    assert f"positions={last}%3A{end}" in next(url for url in asked if "/lens?" in url), "the last position comes first"
    inside.page.locator(".inside").evaluate("box => { box.scrollLeft = 0; }")
    expect(inside.cell(2, 0)).not_to_be_empty()
    inside.button("Next layer").click()
    inside.expect_pause(3)
    expect(inside.cell(3, 0)).to_be_in_viewport()
    expect(inside.cell(3, 0)).not_to_be_empty()
    inside.button("Next token").click()
    expect(inside.cell(3, last + 1)).to_be_in_viewport()
    expect(inside.cell(3, last + 1)).not_to_be_empty()


def test_a_map_whose_connection_dropped_is_asked_for_again(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    lens = re.compile(rf"{inside.id}/lens\?")
    inside.page.route(lens, lambda route: route.abort())
    inside.pause_at(1)
    alert = inside.page.get_by_role("region", name="Layers and lens").get_by_role("alert")
    expect(alert).to_contain_text("The server is away.")
    inside.page.unroute(lens)
    expect(inside.cell(1, 4)).not_to_be_empty()
    expect(alert).to_have_count(0)


def test_the_server_computes_nothing_for_a_screen_that_is_left(inside: Inside) -> None:
    inside.pause_at(1)
    expect(inside.cell(1, 3)).not_to_be_empty()
    inside.page.get_by_role("link", name="Sessions", exact=True).click()
    row = inside.page.locator(f'tr[data-id="{inside.id}"]')
    expect(row).to_contain_text("paused")
    asked: list[str] = []
    inside.page.on("request", lambda request: asked.append(request.url))
    inside.post(f"{inside.path}/cancel", {})
    expect(row).not_to_contain_text("paused")
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    assert not [url for url in asked if "/lens" in url]
