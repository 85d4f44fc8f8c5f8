"""The rules of accessibility, held against a page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

CONTRAST = {"resultTypes": ["violations"], "runOnly": ["color-contrast"]}


def expect_no_violations(page: Page) -> None:
    """It breaks no rule, in either theme: only colours differ between them."""
    page.emulate_media(color_scheme="light")
    light = Axe().run(page)
    assert light.violations_count == 0, light.generate_report()
    page.emulate_media(color_scheme="dark")
    dark = Axe().run(page, options=CONTRAST)
    assert dark.violations_count == 0, dark.generate_report()
