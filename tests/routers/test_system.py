"""What the server tells of itself and of its memory, and the page in the browser with other people's files in it."""

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
from tests.routers.generating import in_tier, wait_for


def test_memory_measures_what_moves(serve_with: ServeWith) -> None:
    http = serve_with()
    before = http.get("/v1/memory").json()["moves"]["in"]
    assert before == {"count": 0, "bytes": 0, "seconds": 0, "bytes_per_s": None}
    assert http.get("/v1/memory/estimate", params={"tokens": 100}).json()["transfer_ms"]["in"] is None
    path = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    body = {"token_ids": [5] * 100, "max_tokens": 0}
    http.post(f"{path}/generate", json=body)
    http.post(f"{path}/phase", json={"phase": "io_wait"})
    wait_for(http, path, in_tier("host"))
    http.post(f"{path}/generate", json=body)
    found = http.get("/v1/memory").json()
    for direction in ("out", "in"):
        moved = found["moves"][direction]
        assert moved["count"] >= 1
        assert moved["bytes"] >= found["data"]["block_bytes"]
        assert moved["bytes_per_s"] == pytest.approx(moved["bytes"] / moved["seconds"])
    moved_in = found["moves"]["in"]
    estimate = http.get("/v1/memory/estimate", params={"tokens": 100}).json()
    assert estimate["transfer_ms"]["in"] == pytest.approx(1000 * estimate["kv_bytes"] / moved_in["bytes_per_s"])


def test_what_is_served_is_told_as_the_operator_has_set_it(serve_with: ServeWith, http: httpx.Client) -> None:
    other = serve_with(kv_policy="lru", served_model_name="house-model")
    assert other.get("/v1/memory").json()["policy"] == "lru"
    assert other.get("/version").json()["model"] == "house-model"
    paths = http.get("/openapi.json").json()["paths"]
    operations = {operation["operationId"] for path in paths.values() for operation in path.values()}
    assert {"createSession", "generate", "estimateMemory"} <= operations
    assert all(name.isidentifier() and "_" not in name for name in operations), "they name methods of made clients"


@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("float32", 1024), ("bfloat16", 512)])
def test_the_estimate_is_what_a_session_then_takes(serve_with: ServeWith, kv_dtype: str, token_bytes: int) -> None:
    """KV in half the bytes leaves room for twice the sessions."""
    http = serve_with(kv_dtype=kv_dtype)
    found = http.get("/version").json()
    assert (found["dtype"], found["kv_dtype"]) == ("float32", kv_dtype)
    estimate = http.get("/v1/memory/estimate", params={"tokens": 100, "bandwidth": 25e9}).json()
    session = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 100, "max_tokens": 0})
    kv, data = http.get(f"/v1/sessions/{session}").json()["kv"], http.get("/v1/memory").json()["data"]
    assert estimate["blocks"] == kv["blocks"] == 7
    assert estimate["kv_bytes_per_token"] == token_bytes
    assert kv["device_bytes"] == data["device"]["owned_bytes"] == estimate["kv_bytes"] == 7 * 16 * token_bytes
    assert (data["block_bytes"], data["device"]["total_bytes"]) == (16 * token_bytes, 4 << 20)
    assert estimate["sessions_resident"] == (4 << 20) // (16 * token_bytes) // 7
    milliseconds = estimate["kv_bytes"] / 25e9 * 1000
    assert estimate["transfer_ms"] == pytest.approx({"in": milliseconds, "out": milliseconds})


@pytest.mark.parametrize(("param", "value"), [("tokens", "0"), ("bandwidth", "0"), ("bandwidth", "inf")])
def test_an_estimate_for_no_size_or_speed_is_refused(http: httpx.Client, param: str, value: str) -> None:
    response = http.get("/v1/memory/estimate", params={"tokens": "100", param: value})
    assert_error(response, 422, "field_out_of_range", param=param)
    sizes = {"prompt_tokens": 8, "completion_tokens": 8, "context_tokens": 1 << 20}
    response = http.post("/v1/capacity/estimate", json=sizes)
    told = assert_error(response, 422, "field_out_of_range", param="context_tokens")
    assert "from 16, what a turn adds, to 1024" in told
    response = http.post("/v1/capacity/estimate", json={**sizes, "prompt_tokens": 1 << 20})
    assert "from 1 to 1024" in assert_error(response, 422, "field_out_of_range", param="prompt_tokens")
    step_s = http.get("/v1/activity?step_s=61")
    assert "a multiple of 60 from 60 to 86400" in assert_error(step_s, 422, "field_out_of_range", param="step_s")


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
