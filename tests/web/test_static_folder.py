"""Files for browsers: their types, their policy, and that a browser gets each once, compressed."""

import gzip
import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.testclient import TestClient

from app.web.static_folder import StaticFolder
from tests.others import turns_of_others

PAGE = b'<!doctype html><script type="importmap">{"imports": {}}</script><script type=module src="app.js"></script>'
PICTURE = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files" / "vendor").mkdir(parents=True)
    (tmp_path / "files" / "index.html").write_bytes(PAGE)
    (tmp_path / "files" / "app.js").write_text("export const one = 1;\n" * 100)
    (tmp_path / "files" / "vendor" / "LICENSE").write_text("MIT")
    (tmp_path / "files" / "icon.png").write_bytes(PICTURE)
    (tmp_path / "secret").write_text("mine")
    return tmp_path / "files"


@pytest.fixture
def http(folder: Path) -> Iterator[TestClient]:
    server, files = FastAPI(), StaticFolder(folder, "files/")

    @server.get("/{name:path}")
    async def get(request: Request, name: str) -> Response:
        return await files.respond(request, name) or Response(status_code=404)

    with TestClient(server) as client:
        client.headers["Accept-Encoding"] = "identity"
        yield client


def test_a_file_is_sent_with_its_type_and_no_browser_guesses_another(http: TestClient, folder: Path) -> None:
    types = {"index.html": "text/html", "app.js": "text/javascript", "vendor/LICENSE": "text/plain", "icon.png": ""}
    for name, text in types.items():
        answer = http.get(f"/{name}")
        assert answer.content == (folder / name).read_bytes()
        assert answer.headers["content-type"] == (f"{text}; charset=utf-8" if text else "image/png")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", ["none.js", "vendor", "%2e%2e/secret", "..%2fsecret", "app.js/", "%00", "a" * 5000])
def test_only_files_of_the_folder_are_found(http: TestClient, name: str) -> None:
    assert http.get(f"/{name}").status_code == 404


def test_a_page_may_load_from_this_server_only(http: TestClient) -> None:
    """Its import map, the one script in the file, runs because the policy has its digest."""
    digest = b64encode(hashlib.sha256(b'{"imports": {}}').digest()).decode()
    policy = dict(
        each.strip().split(" ", 1) for each in http.get("/index.html").headers["content-security-policy"].split(";")
    )
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["style-src"] == policy["connect-src"] == policy["font-src"] == "'self'"
    assert "sha256" not in http.get("/app.js").headers["content-security-policy"]


def test_a_page_names_files_that_browsers_keep_until_any_is_edited(http: TestClient, folder: Path) -> None:
    (folder / "index.html").write_text('<script src="files/app.js"></script> "./files/x" profiles/y')

    def named() -> object:
        page = http.get("/index.html")
        assert page.headers["cache-control"] == "no-cache"
        (found,) = re.findall(r'^<script src="files/(v-\w+)/app.js"></script> "./files/\1/x" profiles/y$', page.text)
        return found

    first = named()
    for version, control in ((first, "public, max-age=31536000, immutable"), (f"v-{'0' * 16}", "no-cache")):
        answer = http.get(f"/{version}/app.js")
        assert (answer.content, answer.headers["cache-control"]) == ((folder / "app.js").read_bytes(), control)
    (folder / "app.js").write_text("export const two = 2;\n")
    (folder / "icon.png").unlink()
    assert http.get(f"/{first}/app.js").headers["cache-control"] == "no-cache", "it is of other files now"
    assert named() != first


def test_what_a_browser_has_is_not_sent_again_until_it_is_edited(http: TestClient, folder: Path) -> None:
    first = http.get("/app.js")
    etag = first.headers["etag"]
    for given in (etag, f'"other", {etag}', etag.removeprefix("W/"), "*"):
        again = http.get("/app.js", headers={"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert http.get("/app.js", headers={"If-None-Match": '"other"'}).content == first.content
    (folder / "app.js").write_text("export const two = 2;\n")
    os.utime(folder / "app.js", ns=(1, 1))  # a clock with coarse ticks may not show the change
    assert http.get("/app.js", headers={"If-None-Match": etag}).text == "export const two = 2;\n"


def test_text_is_compressed_for_who_takes_it_and_nothing_else(http: TestClient, folder: Path) -> None:
    for accepted in ("gzip", "br, gzip;q=0.5", "*"):
        answer = http.get("/app.js", headers={"Accept-Encoding": accepted})
        assert answer.headers["content-encoding"] == "gzip"
        assert int(answer.headers["content-length"]) == len(gzip.compress((folder / "app.js").read_bytes()))
        assert answer.content == (folder / "app.js").read_bytes()
        assert answer.headers["vary"] == "Accept-Encoding"
    for name, accepted in (("app.js", "gzip;q=0"), ("app.js", "br"), ("app.js", ""), ("icon.png", "gzip")):
        assert "content-encoding" not in http.get(f"/{name}", headers={"Accept-Encoding": accepted}).headers


async def test_others_are_served_while_a_file_is_compressed(folder: Path) -> None:
    (folder / "app.js").write_bytes(os.urandom(1 << 19).hex().encode())
    request = Request({"type": "http", "method": "GET", "headers": []})
    assert await turns_of_others(StaticFolder(folder, "files/").respond(request, "app.js")) > 10
