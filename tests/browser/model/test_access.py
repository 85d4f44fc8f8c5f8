"""Inside the model: for everybody, on every screen."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.model.inside import Inside
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

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


def test_an_operator_is_told_whose_session_it_is(open_page: OpenPage, tmp_path: Path) -> None:
    roles = {"alice": "user", "olga": "operator"}
    file = write_tenants(tmp_path / "tenants.json", *(tenant(name, role=role) for name, role in roles.items()))
    with serve(tenants=file) as url, httpx.Client(base_url=url, headers={"X-Api-Key": "alice"}, timeout=60) as alice:
        session = alice.post("/v1/sessions").json()["id"]
        page = open_page(f"{url}/#/sessions/{session}/model", refusals=True)
        page.get_by_label("API key").fill("olga")
        page.get_by_role("button", name="Use this key").click()
        foreign = page.get_by_role("region", name="A session of another tenant")
        expect(foreign).to_contain_text("Only alice may read what it holds")
        expect(page.get_by_role("region", name="Layers and lens")).to_have_count(0)
        page.close()
