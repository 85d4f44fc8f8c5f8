"""Keys: what one has shown is not there for the next, and how they are entered."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.filling import open_session, wait_until
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

pytestmark = pytest.mark.browser


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")


def test_the_next_key_sees_nothing_of_the_last(open_page: OpenPage, tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"), tenant("rival"))
    with serve(tenants=file) as url, httpx.Client(base_url=url, headers={"Authorization": "Bearer acme"}) as http:
        session = open_session(http, tokens=20, name="secret")
        page = open_page(url, refusals=True)
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
        page.goto(f"{url}/#/")
        page.get_by_role("button", name="Forget the key").click()
        enter(page, "rival")
        expect(page.get_by_role("main")).to_contain_text("No session is open.")
        expect(page.get_by_label("Find an id or a tag")).to_have_value("")
        expect(page.get_by_role("list", name="Imports").get_by_role("listitem")).to_have_count(0)
        expect(page.get_by_role("list", name="Messages").get_by_role("listitem")).to_have_count(0)
        page.get_by_role("button", name="Forget the key").click()
        enter(page, "acme")
        page.get_by_role("link", name=session[-8:]).click()
        expect(page.get_by_label("Text")).to_have_value("")
        page.goto("about:blank")


def test_vectors_of_the_last_key_are_not_shown(open_page: OpenPage, tmp_path: Path) -> None:
    file = write_tenants(tmp_path / "tenants.json", tenant("acme"), tenant("rival"))
    with serve(tenants=file) as url, httpx.Client(base_url=url) as http:
        ids = {
            key: http.post("/v1/sessions", headers={"Authorization": f"Bearer {key}"}).json()["id"]
            for key in ("acme", "rival")
        }
        page = open_page(f"{url}/#/sessions/{ids['acme']}/model", refusals=True)
        page.route("**/v1/vectors", lambda route: route.fulfill(json={"data": [OURS]}))
        enter(page, "acme")
        vectors = page.get_by_role("region", name="Vectors")
        expect(vectors).to_contain_text("our-vector")
        page.unroute("**/v1/vectors")
        page.route("**/v1/vectors", lambda route: None)  # no answer
        page.get_by_role("button", name="Forget the key").click()
        page.goto(f"{url}/#/sessions/{ids['rival']}/model")
        enter(page, "rival")
        expect(vectors).to_contain_text("Loading vectors")
        expect(vectors).not_to_contain_text("our-vector")
        page.goto("about:blank")


OURS = {"name": "our-vector", "size": 64, "dtype": "F32", "norm": 1.0}


def test_the_same_key_once_more_is_another_try(open_page: OpenPage) -> None:
    with serve(api_keys=("right",)) as url:
        page = open_page(url, refusals=True)
        page.route("**/version", lambda route: route.fulfill(status=401, json={"error": {"message": "not yet"}}))
        enter(page, "right")
        expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        page.unroute("**/version")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Live")
        page.goto("about:blank")


def test_a_key_is_trimmed_and_the_last_refusal_goes_as_one_types(open_page: OpenPage) -> None:
    with serve(api_keys=("right",)) as url:
        page = open_page(url, refusals=True)
        enter(page, "wrong")
        expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
        enter(page, "")
        expect(page.get_by_role("main")).not_to_contain_text("does not know this key")
        enter(page, " right  ")
        expect(page.get_by_role("banner").get_by_role("status")).to_have_text("Live")
        page.goto("about:blank")


def test_a_turn_of_the_last_key_ends_with_it(open_page: OpenPage, roomy_model: Path) -> None:
    server = serve(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20, api_keys=("one", "two"))
    with server as url, httpx.Client(base_url=url, headers={"Authorization": "Bearer one"}) as http:
        session = open_session(http, name="busy")
        page = open_page(f"{url}/#/sessions/{session}", refusals=True)
        enter(page, "one")
        page.get_by_label("Text").fill("Hello")
        page.get_by_label("Most tokens").fill("8000")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Ignore the end token").check()
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".token.generated").nth(3)).to_be_visible()
        page.get_by_role("button", name="Forget the key").click()
        view = wait_until(http, session, lambda view: view["state"] == "idle")
        assert 6 < view["tokens"] < 8000
        page.goto("about:blank")


def test_an_address_that_is_no_escaped_text_shows_the_sessions(open_page: OpenPage, page_server: str) -> None:
    page = open_page(f"{page_server}/#/%")
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    expect(page).to_have_title("Sessions · Djinn")
    page.goto(f"{page_server}/#/sessions/%E0%A4%A")
    expect(page.get_by_role("heading", name="There is no such session")).to_be_visible()
    expect(page).to_have_title(re.compile("^Session .* · Djinn$"))
