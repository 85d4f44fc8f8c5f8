"""The page in the browser, and other people's files in it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest

import app
from tests.conftest import ServeWith
from tests.errors import assert_error


def test_the_page_is_at_the_root(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert http.get("/static/index.html").content == page.content
    head = http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == page.headers["etag"]


def test_the_page_needs_no_key_but_the_api_does(serve_with: ServeWith) -> None:
    guarded = serve_with(api_keys=("sesame",))
    assert guarded.get("/").status_code == guarded.get("/static/index.html").status_code == 200
    assert_error(guarded.get("/static"), 401, "invalid_api_key")
    assert_error(guarded.get("/v1/sessions"), 401, "invalid_api_key")
    assert_error(guarded.get("/static/none.js"), 404, "not_found")


FOLDER = Path(app.__path__[0]) / "static" / "vendor"
PACKAGES: dict[str, Any] = json.loads(Path(__file__).with_name("vendored.json").read_text("utf-8"))
"""By name: the version, npm's digest of its tarball, and of each file here its place there and its own digest."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_every_vendored_file_is_listed_and_unchanged() -> None:
    found = {
        path.relative_to(FOLDER).as_posix(): sha256(path.read_bytes()) for path in FOLDER.rglob("*") if path.is_file()
    }
    listed = {ours: file["sha256"] for each in PACKAGES.values() for ours, file in each["files"].items()}
    assert found == listed


@pytest.mark.long
@pytest.mark.parametrize("name", PACKAGES)
def test_the_listed_digests_are_npms(name: str) -> None:
    package = PACKAGES[name]
    url = f"https://registry.npmjs.org/{name}/-/{name.rpartition('/')[2]}-{package['version']}.tgz"
    tarball = httpx.get(url, timeout=60, follow_redirects=True).raise_for_status().content
    assert package["integrity"] == "sha512-" + b64encode(hashlib.sha512(tarball).digest()).decode()
    with tarfile.open(fileobj=io.BytesIO(tarball)) as files:
        for file in package["files"].values():
            member = files.extractfile(f"package/{file['from']}")
            assert member is not None
            assert sha256(member.read()) == file["sha256"]
