"""Inside the model: breakpoints that the page arms beside those of programs and other tabs."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import eventually
from tests.browser.model.inside import Inside

pytestmark = pytest.mark.browser


def test_captures_of_a_program_stay(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
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
    watch.check()
    eventually(lambda: len(inside.breakpoints("capture")), 2)
    watch.uncheck()
    eventually(lambda: inside.breakpoints("capture"), [mine])


def test_the_watch_of_a_pause_ends_with_its_turn_and_one_that_was_asked_for_outlives_it(
    http: httpx.Client, open_page: OpenPage
) -> None:
    inside = Inside(http, open_page)
    inside.pause_at(1)
    assert len(inside.breakpoints("capture")) == 1
    inside.button("To the end").click()
    inside.expect_idle()
    watch = inside.page.get_by_label("Watch all layers")
    expect(watch).not_to_be_checked()
    assert not inside.breakpoints("capture")
    watch.check()
    eventually(lambda: len(inside.breakpoints("capture")), 1)
    inside.pause_at(1)
    inside.button("To the end").click()
    inside.expect_idle()
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
    expect(watch).to_be_checked()
    assert len(inside.breakpoints("capture")) == 1


def test_what_others_have_removed_is_no_obstacle(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, refusals=True)
    inside.arm(1)
    inside.page.route("**/breakpoints/*", lambda route: remove_before(inside, route), times=1)
    inside.rung(1).click()
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
    inside.arm(1)
    assert [each["layers"] for each in inside.breakpoints("pause")] == [[1]]
    expect(inside.page.get_by_role("alert")).to_have_count(0)


def test_another_tab_shows_what_one_has_armed_and_removed(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
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


def test_a_pause_that_another_has_just_armed_is_not_armed_twice(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
    inside.page.route("**/breakpoints", lambda route: arm_before(inside, route), times=1)
    inside.arm(1)
    assert len(inside.breakpoints("pause")) == 1


def arm_before(inside: Inside, route: Route) -> None:
    """Another tab is faster by a moment."""
    inside.post(f"{inside.path}/breakpoints", {"layer": 1, "action": "pause"})
    route.continue_()


def remove_before(inside: Inside, route: Route) -> None:
    """Another client is faster by a moment."""
    inside.call("DELETE", f"{inside.path}/breakpoints")
    route.continue_()


def test_a_return_to_the_screen_shows_what_is_armed_now(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page)
    inside.arm(1)
    inside.page.get_by_role("link", name=inside.id[-8:], exact=True).click()
    expect(inside.page.get_by_role("region", name="Facts")).to_be_visible()
    inside.call("DELETE", f"{inside.path}/breakpoints")
    inside.post(f"{inside.path}/breakpoints", {"layer": 2, "action": "pause"})
    inside.page.go_back()
    expect(inside.rung(2)).to_have_attribute("aria-pressed", "true")
    expect(inside.rung(1)).to_have_attribute("aria-pressed", "false")
