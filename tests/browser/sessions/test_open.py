"""New sessions: with labels, or from an exported file that is dropped on the screen."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import APIResponse, FilePayload, Route, expect

from tests.browser.conftest import OpenPage, close_all
from tests.browser.filling import drop, open_session

pytestmark = pytest.mark.browser


def test_a_session_is_opened_with_labels(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page(refusals=True)
    page.get_by_role("button", name="New session").click()
    form = page.get_by_role("dialog", name="New session")
    form.get_by_label("Metadata").fill(f"{'n' * 65}: ada")
    form.get_by_role("button", name="Open the session").click()
    expect(form.get_by_role("alert")).to_contain_text("64")
    expect(form.get_by_label("Metadata")).to_have_value(f"{'n' * 65}: ada")
    form.get_by_role("button", name="Cancel").click()
    expect(form).to_be_hidden()
    assert http.get("/v1/sessions").json()["data"] == []
    page.get_by_role("button", name="New session").click()
    form.get_by_label("Metadata").fill("name: ada\nno colon")
    form.get_by_role("button", name="Open the session").click()
    expect(form.get_by_role("alert")).to_contain_text('"no colon" has no "name: value"')
    form.get_by_label("Metadata").fill("name: ada\nteam: <b>blue</b>")
    form.get_by_role("button", name="Open the session").click()
    expect(page).to_have_url(re.compile("#/sessions/ses_"))
    opened = http.get(f"/v1/sessions/{page.url.rpartition('/')[2]}").json()
    assert opened["metadata"] == {"name": "ada", "team": "<b>blue</b>"}
    page.get_by_role("link", name="Sessions", exact=True).click()
    expect(page.get_by_role("region", name="Table of sessions")).to_contain_text("team: <b>blue</b>")


def test_a_session_that_is_closed_before_its_answer_comes_is_not_there(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page()
    expect(page.get_by_role("main")).to_contain_text("No session is open.")

    held: list[tuple[Route, APIResponse]] = []
    page.route("**/v1/sessions", lambda route: held.append((route, route.fetch())))
    page.get_by_role("button", name="New session").click()
    page.get_by_role("button", name="Open the session").click()
    expect(page.locator("tbody tr[data-id]")).to_have_count(1)
    close_all(http)
    expect(page.locator("tbody tr[data-id]")).to_have_count(0)
    route, answer = held[0]
    route.fulfill(response=answer)
    expect(page.get_by_role("heading", name="There is no such session")).to_be_visible()
    page.get_by_role("link", name="Sessions", exact=True).click()
    expect(page.get_by_role("main")).to_contain_text("No session is open.")


def test_an_exported_file_is_dropped_on_the_page(open_page: OpenPage, http: httpx.Client) -> None:
    session = open_session(http, tokens=40, name="emigrant")
    file = http.get(f"/v1/sessions/{session}/export").content
    http.delete(f"/v1/sessions/{session}").raise_for_status()
    page = open_page()
    expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    drop(page, file, "emigrant.safetensors")
    page.get_by_role("list", name="Imports").get_by_role("link").click()
    expect(page).to_have_url(re.compile("#/sessions/ses_"))
    [arrived] = http.get("/v1/sessions").json()["data"]
    assert page.url.endswith(arrived["id"])
    assert (arrived["tokens"], arrived["metadata"]) == (40, {"name": "emigrant"})


def test_a_file_that_is_no_session_says_so(open_page: OpenPage, http: httpx.Client) -> None:
    page = open_page(refusals=True)
    file = FilePayload(name="holiday.safetensors", mimeType="image/jpeg", buffer=b"not a session at all")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import a file").click()
    chooser.value.set_files(file)
    imports = page.get_by_role("list", name="Imports")
    expect(imports).to_contain_text("holiday.safetensors (20 B)")
    expect(imports.get_by_role("alert")).not_to_be_empty()
    imports.get_by_role("button", name="Try again").click()
    expect(imports.get_by_role("alert")).not_to_be_empty()
    imports.get_by_role("button", name="Forget the import of holiday.safetensors").click()
    expect(imports.get_by_role("listitem")).to_have_count(0)
    assert http.get("/v1/sessions").json()["data"] == []
