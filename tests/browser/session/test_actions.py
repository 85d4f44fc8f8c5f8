"""The buttons beside a session: phases, forks, files, and its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.filling import drop
from tests.browser.session.on_session import OnSession, panel

pytestmark = pytest.mark.browser


def sessions(on: OnSession) -> set[str]:
    data = on.api.get("/v1/sessions", params={"limit": 100}).raise_for_status().json()["data"]
    return {view["id"] for view in data}


def test_parking_moves_the_kv_away_and_calling_back_brings_it(on: OnSession) -> None:
    on.generate("Hello there", tokens=40)
    page = on.open()
    field = page.get_by_label("back in")
    field.fill("soon")
    page.get_by_role("button", name="Park").click()
    expect(field).to_have_accessible_description("back in: a number of seconds from 0 to 86400; got soon")
    assert on.view()["phase"] == "compute"
    field.fill("3600")
    page.get_by_role("button", name="Park").click()
    on.wait_until(phase="io_wait")
    expect(field).not_to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("list", name="Messages")).to_contain_text(f"Session {on.id[-8:]} has phase io_wait: ")
    expect(page.get_by_role("heading", level=1).locator("..")).to_contain_text("KV in host memory")
    view = on.view()
    assert view["kv"]["tier"] == "host"
    page.get_by_role("button", name="Call back").click()
    on.wait_until(phase="ready")
    expect(page.get_by_role("heading", level=1).locator("..")).to_contain_text("KV on the device")
    page.get_by_role("button", name="Mark idle").click()
    on.wait_until(phase="idle")


def test_a_fork_opens_beside_its_origin(on: OnSession) -> None:
    on.generate()
    page = on.open()
    page.get_by_role("button", name="Fork").click()
    expect(page).not_to_have_url(re.compile(on.id))
    child = page.url.split("/")[-1]
    assert on.api.get(f"/v1/sessions/{child}/history").json() == on.history()


PICK = """() => {
    window.showSaveFilePicker = async ({ suggestedName }) =>
        (await navigator.storage.getDirectory()).getFileHandle(suggestedName, { create: true });
}"""
SAVED = """async (name) => {
    const file = await (await (await navigator.storage.getDirectory()).getFileHandle(name)).getFile();
    return [...new Uint8Array(await file.arrayBuffer())];
}"""


def test_an_export_is_the_files_content(on: OnSession, tmp_path: Path) -> None:
    on.generate()
    page = on.open()
    page.evaluate("delete window.showSaveFilePicker")
    export = page.get_by_role("button", name="Export", exact=True)
    with page.expect_download() as waiting:
        export.click()
    assert waiting.value.suggested_filename == f"{on.id}.safetensors"
    waiting.value.save_as(tmp_path / "session")
    messages = page.get_by_role("list", name="Messages").get_by_role("listitem")
    expect(messages).to_contain_text([f"is saved as {on.id}.safetensors"])
    expect_same(on, (tmp_path / "session").read_bytes())
    page.get_by_role("button", name="Close this message").click()
    page.evaluate(PICK)
    export.click()
    expect(messages).to_contain_text([f"Session {on.id[-8:]} is saved as {on.id}.safetensors: "])
    expect_same(on, bytes(page.evaluate(SAVED, f"{on.id}.safetensors")))
    page.route("**/export", lambda route: None)  # no answer
    export.click()
    expect(export).to_be_disabled()
    page.get_by_role("button", name="Park").click()  # which does not wait for it
    on.wait_until(phase="io_wait")


def expect_same(on: OnSession, file: bytes) -> None:
    """An exported file holds the session's history."""
    imported = on.api.post("/v1/sessions/import", content=file).raise_for_status().json()
    assert on.api.get(f"/v1/sessions/{imported['id']}/history").json() == on.history()


def test_a_file_that_is_dropped_opens_a_session_beside_this_one(on: OnSession) -> None:
    on.generate()
    page = on.open(refusals=True)
    before, alert = sessions(on), panel(page, "Actions").get_by_role("alert")
    for content, names, says in ((b"a letter", ("one",), "the import failed"), (b"", ("one", "two"), "not 2")):
        drop(page, content, *names)
        expect(alert).to_contain_text(says)
    assert sessions(on) == before
    drop(page, on.api.get(f"/v1/sessions/{on.id}/export").content, "session.safetensors")
    expect(page).not_to_have_url(re.compile(on.id))
    (dropped,) = sessions(on) - before
    assert on.api.get(f"/v1/sessions/{dropped}/history").json() == on.history()


def test_closing_asks_first(on: OnSession) -> None:
    page = on.open()
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="Leave it").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert on.id in sessions(on)
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_role("button", name="Close the session").click()
    expect(page).to_have_url(str(on.api.base_url.join("/#/")))
    assert on.id not in sessions(on)
