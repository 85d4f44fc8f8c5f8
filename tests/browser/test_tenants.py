"""Keys: how they are entered, and what ends with each. Nobody sees anything of another tenant, except an operator."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import DRAW_MS, OpenPage, close_all
from tests.browser.filling import open_session, row, wait_until
from tests.incident import NAMED, incident
from tests.serving import serve
from tests.tenants.tenant_files import tenant, write_tenants

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def keyed_server(roomy_model: Path) -> Iterator[str]:
    """Base URL of a server with two keys, and with room for a turn that does not end while a test looks at it."""
    with serve(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20, api_keys=("right", "other")) as url:
        yield url


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").press("Enter")


def test_a_server_with_keys_asks_for_one_and_keeps_it_nowhere(open_page: OpenPage, keyed_server: str) -> None:
    page = open_page(keyed_server, refusals=True)
    status = page.get_by_role("banner").get_by_role("status")
    field = page.get_by_label("API key")
    field.fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    enter(page, "")
    expect(page.get_by_role("main")).not_to_contain_text("does not know this key")
    page.route("**/version", lambda route: route.fulfill(status=401, json={"error": {"message": "not yet"}}))
    enter(page, " right  ")
    expect(page.get_by_role("alert")).to_have_text("The server does not know this key.")
    page.unroute("**/version")
    page.get_by_role("button", name="Use this key").click()  # the same once more is another try
    expect(status).to_have_text("Live")
    assert "right" not in page.url
    assert page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
    page.get_by_role("button", name="Forget the key").click()
    expect(field).to_be_visible()


def test_a_turn_of_the_last_key_ends_with_it(open_page: OpenPage, keyed_server: str) -> None:
    with httpx.Client(base_url=keyed_server, headers={"Authorization": "Bearer right"}) as http:
        session = open_session(http, name="busy")
        page = open_page(f"{keyed_server}/#/sessions/{session}", refusals=True)
        enter(page, "right")
        page.get_by_label("Text").fill("Hello")
        page.get_by_label("Most tokens").fill("8000")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Ignore the end token").check()
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".token.generated").nth(3)).to_be_visible()
        page.get_by_role("button", name="Forget the key").click()
        view = wait_until(http, session, lambda view: view["state"] == "idle")
        assert 6 < view["tokens"] < 8000


def test_the_page_of_the_api_asks_for_a_key_and_tries_a_route_with_it(open_page: OpenPage, keyed_server: str) -> None:
    page = open_page(f"{keyed_server}/docs", refusals=True)
    page.set_default_timeout(DRAW_MS)
    field = page.get_by_label("API key")
    field.fill("wrong")
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_role("alert")).to_contain_text("a valid API key is needed")
    field.fill("right")
    field.press("Enter")
    page.locator("#operations-tag-system").click()
    route = page.locator("#operations-system-getVersion")
    route.get_by_role("button").first.click()
    route.get_by_role("button", name="Try it out").click()
    route.get_by_role("button", name="Execute").click()
    expect(route.locator(".live-responses-table")).to_contain_text('"hidden_size"', timeout=DRAW_MS)
    assert "right" not in page.url


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
        keyed = {name: httpx.Client(base_url=tenants_server, headers={"X-Api-Key": name}, timeout=60) for name in ROLES}
        clients = {name: ends.enter_context(client) for name, client in keyed.items()}
        close_all(clients["ops"])
        yield clients


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
    expect(row(page, session)).to_contain_text("io_wait")
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


def test_the_first_screen_names_what_is_wrong(open_page: OpenPage, tmp_path: Path) -> None:
    with incident(tmp_path) as clients:
        page = open_page(str(clients["agents"].base_url), refusals=True)
        enter(page, "agents")
        found = page.get_by_role("list", name="What needs a look")
        for each in NAMED:
            expect(found).to_contain_text(re.compile(each))
            expect(found.get_by_text(re.compile(each))).to_be_in_viewport()
        found.get_by_role("button", name="Park it").click()
        expect(found).not_to_contain_text("hoarder")
        found.get_by_role("listitem").filter(has_text="queue").get_by_role("button", name="Show its sessions").click()
        expect(page.get_by_label("Find an id or a tag")).to_have_value("greedy")
        page.goto("about:blank")


def test_vectors_of_the_last_key_are_not_shown(open_page: OpenPage, of: dict[str, httpx.Client]) -> None:
    addresses = {name: f"{each.base_url}/#/sessions/{open_session(each)}/model" for name, each in of.items()}
    page = open_page(addresses["acme"], refusals=True)
    ours = {"name": "our-vector", "size": 64, "dtype": "F32", "norm": 1.0}
    page.route("**/v1/vectors", lambda route: route.fulfill(json={"data": [ours]}))
    enter(page, "acme")
    vectors = page.get_by_role("region", name="Vectors")
    expect(vectors).to_contain_text("our-vector")
    page.unroute("**/v1/vectors")
    page.route("**/v1/vectors", lambda route: None)  # no answer
    page.get_by_role("button", name="Forget the key").click()
    page.goto(addresses["rival"])
    enter(page, "rival")
    expect(vectors).to_contain_text("Loading vectors")
    expect(vectors).not_to_contain_text("our-vector")
