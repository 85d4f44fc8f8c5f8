"""Inside the model: the lens follows histories that are cut, edits that come between, and the eyes."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import APIResponse, Route, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import eventually
from tests.browser.model.inside import Inside
from tests.browser.model.test_lens import visible

pytestmark = pytest.mark.browser

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


def test_other_tokens_of_the_same_number_are_read_anew(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.page.get_by_label("Watch all layers").check()
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


def test_an_edit_outdates_the_answer_that_is_under_way(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    held: list[tuple[Route, APIResponse]] = []

    def hold_first(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append((route, route.fetch()))

    inside.page.route(re.compile(rf"{inside.id}/lens\?"), hold_first)
    last = inside.layers - 1
    inside.pause_at(last)
    position = inside.view["checkpoint"]["end"] - 1
    inside.page.get_by_label("Operation").select_option("ablate")
    inside.button("Try it").click()
    expect(inside.page.get_by_role("table", name=re.compile("After"))).to_be_visible()
    route, answer = held[0]
    now = inside.get(f"{inside.path}/lens?positions={position}:{position + 1}")
    assert best(now, 0) != best(answer.json(), position)
    route.fulfill(response=answer)
    expect_map(inside, position)
    inside.page.route(re.compile(r"/lens\?"), lambda route: None)  # no answer
    inside.button("Fork and compare").click()  # which takes the edit back first
    expect(inside.page.get_by_role("region", name="Fork and compare").get_by_role("article")).to_have_count(2)
    expect(inside.cell(last, position)).not_to_be_empty()


def test_steps_in_a_row_keep_what_is_known_and_ask_for_the_rest(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
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
    expect(inside.cell(0, 4)).not_to_be_empty()
    assert parse_qs(urlsplit(asked.value.url).query)["layers"] == [",".join(map(str, range(1, inside.layers)))]


def test_a_map_whose_connection_dropped_is_asked_for_again(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    inside.page.route(re.compile(rf"{inside.id}/lens\?"), lambda route: route.abort(), times=1)
    inside.pause_at(1)
    lens = inside.page.get_by_role("region", name="Layers and lens")
    expect(lens.get_by_role("alert")).to_contain_text("The server is away.")
    expect(inside.cell(1, 4)).not_to_be_empty()
    expect(lens.get_by_role("alert")).to_have_count(0)


def test_a_new_pause_brings_the_map_to_its_tokens(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.arm(1)
    inside.start("The quick brown fox. " * 12)
    inside.expect_pause(1)
    box = inside.page.locator(".inside")
    box.evaluate("box => { box.scrollLeft = 0; }")
    expect(inside.cell(1, 0)).not_to_be_empty()
    inside.button("To the end").click()
    inside.expect_idle()
    inside.pause_at(2)
    last = inside.view["checkpoint"]["end"] - 1
    expect(inside.cell(2, last)).to_be_in_viewport()
    expect(inside.cell(2, last)).not_to_be_empty()
    box.evaluate("box => { box.scrollLeft = 0; }")
    expect(inside.cell(2, 0)).to_be_in_viewport()
    inside.button("Next layer").click()
    inside.expect_pause(3)
    expect(inside.cell(3, 0)).to_be_in_viewport()
    expect(inside.cell(3, 0)).not_to_be_empty()
    inside.button("Next token").click()
    expect(inside.cell(3, last + 1)).to_be_in_viewport()
    expect(inside.cell(3, last + 1)).not_to_be_empty()
