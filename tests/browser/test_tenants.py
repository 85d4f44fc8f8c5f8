"""Tenants: nobody sees anything of another, except an operator, who sees figures and may close."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import OpenPage, close_all
from tests.browser.filling import open_session
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

pytestmark = pytest.mark.browser

ROLES = {"acme": "user", "rival": "user", "ops": "operator"}


@pytest.fixture(scope="module")
def tenants_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a server with these tenants, whose names are their keys."""
    folder = tmp_path_factory.mktemp("tenants")
    with serve(tenants=write_tenants(folder / "t.json", *(tenant(name, role=ROLES[name]) for name in ROLES))) as url:
        yield url


@pytest.fixture
def of(tenants_server: str) -> Iterator[dict[str, httpx.Client]]:
    """A client of each tenant; none has a session before the test."""
    with ExitStack() as ends:
        clients = {
            name: ends.enter_context(
                httpx.Client(base_url=tenants_server, headers={"Authorization": f"Bearer {name}"}, timeout=60)
            )
            for name in ROLES
        }
        close_all(clients["ops"])
        yield clients


def enter(page: Page, key: str) -> None:
    """Use this key, in the field that asks for one."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def row(page: Page, session: str) -> Locator:
    return page.locator(f'tr[data-id="{session}"]')


def test_the_next_key_sees_nothing_of_the_last(open_page: OpenPage, of: dict[str, httpx.Client]) -> None:
    session = open_session(of["acme"], tokens=20, name="secret")
    page = open_page(str(of["acme"].base_url), refusals=True)
    enter(page, "acme")
    field = page.get_by_label("Session files")
    field.set_input_files({"name": "plans.safetensors", "mimeType": "image/png", "buffer": b"no session"})
    expect(page.get_by_role("list", name="Imports")).to_contain_text("plans.safetensors")
    page.get_by_label("Find an id or a tag").fill("secret")
    page.get_by_role("button", name="Park secret").click()
    page.get_by_role("link", name=session[-8:]).click()
    page.get_by_label("Text").fill("our secret plan")
    page.get_by_role("button", name="Call back").click()
    expect(page.get_by_role("list", name="Messages")).to_contain_text("phase ready")
    page.get_by_role("button", name="Forget the key").click()
    enter(page, "rival")
    expect(page.get_by_role("heading", name="There is no such session")).to_be_visible()
    page.get_by_role("link", name="See all 0 sessions").click()
    expect(page.get_by_role("main")).to_contain_text("No session is open.")
    expect(page.get_by_role("main")).not_to_contain_text("secret")
    expect(page.get_by_label("Find an id or a tag")).to_have_value("")
    expect(page.get_by_role("list", name="Imports").get_by_role("listitem")).to_have_count(0)
    expect(page.get_by_role("list", name="Messages").get_by_role("listitem")).to_have_count(0)
    page.get_by_role("button", name="Forget the key").click()
    enter(page, "acme")
    page.get_by_role("link", name=session[-8:]).click()
    expect(page.get_by_label("Text")).to_have_value("")


def test_an_operator_sees_all_tenants_reads_only_its_own_and_may_close_any(
    open_page: OpenPage, of: dict[str, httpx.Client]
) -> None:
    session, own = open_session(of["acme"], tokens=40, name="secret"), open_session(of["ops"], agent="mine")
    page = open_page(str(of["ops"].base_url), refusals=True)
    enter(page, "ops")
    expect(row(page, own).locator(".tag")).to_have_text(["agent: mine", "tenant ops"])
    expect(row(page, session)).to_contain_text("tenant acme")
    expect(row(page, session)).not_to_contain_text("secret")
    expect(page.get_by_role("region", name="Table of tenants")).to_contain_text(re.compile("acme.*48 KiB"))
    row(page, session).get_by_role("button", name="Park").click()
    expect(row(page, session).get_by_role("alert")).to_contain_text("another tenant's")
    page.get_by_role("button", name="Close this message").click()
    page.goto(f"{of['ops'].base_url}/#/sessions/{session}/model")
    foreign = page.get_by_role("region", name="A session of another tenant")
    expect(foreign).to_contain_text("Only acme may read what it holds")
    expect(page.get_by_role("region", name="Layers and lens")).to_have_count(0)
    page.get_by_role("link", name=session[-8:], exact=True).click()
    expect(page.get_by_role("region", name="Facts")).to_contain_text("40 tokens")
    expect(foreign).to_contain_text("Only acme may read what it holds")
    expect(page.locator(".token")).to_have_count(0)
    foreign.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Close the session").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert of["acme"].get(f"/v1/sessions/{session}").status_code == 404
