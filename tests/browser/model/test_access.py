"""Inside the model: for everybody, on every screen."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser.accessibility import expect_no_violations
from tests.browser.conftest import OpenPage
from tests.browser.filling import eventually
from tests.browser.model.inside import Inside

pytestmark = pytest.mark.browser

FITS = "document.documentElement.scrollWidth <= innerWidth"


def test_it_breaks_no_rule_of_accessibility_and_fits_any_window(http: httpx.Client, open_page: OpenPage) -> None:
    inside = Inside(http, open_page, viewport={"width": 400, "height": 900})
    expect_no_violations(inside.page)
    inside.pause_at(1)
    for width in (400, 3840, 1280):
        inside.page.set_viewport_size({"width": width, "height": 900})
        expect(inside.cell(1, inside.view["checkpoint"]["end"] - 1)).not_to_be_empty()
        eventually(lambda: inside.page.evaluate(FITS), wanted=True)
    inside.cell(1, 3).click()
    inside.page.locator(".tops button").first.click()
    inside.button("Try it").click()
    expect(inside.page.get_by_role("table", name="After")).to_be_visible()
    expect_no_violations(inside.page)
