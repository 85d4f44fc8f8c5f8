"""Inside the model: for everybody, on every screen."""

from __future__ import annotations

from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.model.inside import Inside

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_breaks_no_rule_of_accessibility(
    open_page: OpenPage, page_server: str, scheme: Literal["light", "dark"]
) -> None:
    inside = Inside(page_server, open_page, color_scheme=scheme)
    expect_no_violations(inside.page)
    inside.pause_at(1)
    inside.cell(1, 3).click()
    inside.page.locator(".tops button").first.click()
    inside.button("Preview").click()
    expect(inside.page.get_by_role("table", name="After")).to_be_visible()
    expect_no_violations(inside.page)


def expect_no_violations(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("width", [400, 3840])
def test_nothing_is_wider_than_the_screen(open_page: OpenPage, page_server: str, width: int) -> None:
    inside = Inside(page_server, open_page, viewport={"width": width, "height": 900})
    inside.pause_at(1)
    expect(inside.cell(1, inside.view["checkpoint"]["end"] - 1)).not_to_be_empty()
    assert inside.page.evaluate("document.documentElement.scrollWidth") <= width
