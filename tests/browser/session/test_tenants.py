"""A session of another tenant on an operator's page."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.session.on_session import panel
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

pytestmark = pytest.mark.browser


def enter(page: Page, key: str) -> None:
    """Use this key, in the field that asks for one."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_an_operator_sees_figures_and_may_close(open_page: OpenPage, tmp_path: Path) -> None:
    roles = {"alice": "user", "olga": "operator"}
    file = write_tenants(tmp_path / "tenants.json", *(tenant(name, role=role) for name, role in roles.items()))
    with serve(tenants=file) as url, httpx.Client(base_url=url, headers={"X-Api-Key": "alice"}, timeout=60) as alice:
        session = alice.post("/v1/sessions").json()["id"]
        asked = {"prompt": "a secret", "max_tokens": 0}
        alice.post(f"/v1/sessions/{session}/generate", json=asked).raise_for_status()
        page = open_page(f"{url}/#/sessions/{session}", refusals=True)
        enter(page, "olga")
        foreign = panel(page, "A session of another tenant")
        expect(foreign).to_contain_text("Only alice may read what it holds")
        expect(panel(page, "Facts")).to_contain_text("9 tokens")
        expect(page.locator(".token")).to_have_count(0)
        foreign.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Close the session").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert alice.get(f"/v1/sessions/{session}").status_code == 404
        page.close()
