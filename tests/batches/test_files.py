"""`/v1/files`, by OpenAI's SDK and by clients that do it wrong."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.web.multipart import FormPart, form_parts
from tests.batches.test_batches import sdk_of
from tests.errors import assert_error
from tests.processes import metric
from tests.serving import serve
from tests.waiting import wait_until

PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch_output'
BEGIN = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
END = b"\r\n--b--\r\n"


@settings(max_examples=60)
@given(content=st.binary(max_size=200) | st.sampled_from([b"\r\n", b"\r\n--", b"--b\r\n\r\n"]), data=st.data())
def test_a_form_is_read_alike_however_it_is_cut(content: bytes, data: st.DataObject) -> None:
    asked: Any = {"data": {"purpose": "batch", "empty": ""}, "files": {"file": ("Größe.jsonl", content)}}
    request = httpx.Request("POST", "http://x", **asked)
    body = request.read()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))

    async def chunks() -> AsyncIterator[bytes]:
        for first, end in pairwise([0, *cuts, len(body)]):
            yield body[first:end]

    async def read() -> list[list[Any]]:
        found = list[list[Any]]()
        async for piece in form_parts(request.headers["content-type"], chunks()):
            if isinstance(piece, FormPart):
                found.append([piece.name, piece.filename, b""])
            else:
                found[-1][2] += piece
        return found

    expected = [["purpose", None, b"batch"], ["empty", None, b""], ["file", "Größe.jsonl", content]]
    assert asyncio.run(read()) == expected


def test_files_are_kept_listed_read_and_deleted_and_survive_a_restart(tmp_path: Path) -> None:
    content = random.Random(1).randbytes((8 << 20) + 12345)  # larger than the body of any other request may be
    with serve(state_dir=tmp_path) as url, sdk_of(url) as sdk:
        large = sdk.files.create(file=("größe.bin", content), purpose="user_data")
        small = sdk.files.create(file=b"{}\n", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
        assert (large.bytes, large.filename, large.purpose) == (len(content), "größe.bin", "user_data")
        assert small.expires_at == small.created_at + 3600
    with serve(state_dir=tmp_path) as url, httpx.Client(base_url=url) as http, sdk_of(url) as sdk:
        assert list(sdk.files.list(limit=1)) == [small, large]
        assert list(sdk.files.list(purpose="batch")) == [sdk.files.retrieve(small.id)] == [small]
        assert sdk.files.content(large.id).content == content
        assert metric(http, "djinn_files_bytes") == len(content) + 3
        assert sdk.files.delete(large.id).deleted
        with pytest.raises(openai.NotFoundError):
            sdk.files.content(large.id)
        assert [each.name for each in (tmp_path / "files").glob(f"{large.id}*")] == []


@pytest.fixture(scope="module")
def tenants() -> Iterator[list[httpx.Client]]:
    """Two tenants of a server, which keeps 1 MiB of files."""
    with serve(api_keys=("ours", "theirs"), max_files_bytes=1 << 20) as url, ExitStack() as ends:
        headers = ({"X-Api-Key": key} for key in ("ours", "theirs"))
        yield [ends.enter_context(httpx.Client(base_url=url, headers=each)) for each in headers]


def test_a_tenant_sees_its_own_files_and_leaves_room_to_others(tenants: list[httpx.Client]) -> None:
    ours, theirs = tenants

    def upload(http: httpx.Client, count: int) -> httpx.Response:
        return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"x" * count)})

    first = upload(ours, 400_000).json()["id"]
    assert_error(upload(ours, 300_000), 400, "files_full")
    assert_error(upload(ours, 2 << 20), 413, "request_too_large")
    assert upload(theirs, 300_000).status_code == 200
    assert first not in theirs.get("/v1/files").text
    for answer in (theirs.get(f"/v1/files/{first}"), theirs.delete(f"/v1/files/{first}")):
        assert_error(answer, 404, "not_found", param="file_id")
    asked = {"input_file_id": first, "endpoint": "/v1/completions", "completion_window": "24h"}
    assert_error(theirs.post("/v1/batches", json=asked), 404, "not_found", param="input_file_id")
    path = f"/v1/batches/{ours.post('/v1/batches', json=asked).json()['id']}"
    assert_error(theirs.post(f"{path}/cancel"), 404, "not_found", param="batch_id")
    wait_until(lambda: ours.get(path).json()["status"] == "failed")
    ours.delete(f"/v1/files/{first}").raise_for_status()
    assert upload(ours, 300_000).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (BEGIN + b"x", "body"),
        (BEGIN + b"x" + END, "purpose"),
        (BEGIN + b"x\r\n" + BEGIN + b"y" + END, "file"),
        (PURPOSE + END, "file"),
        (PURPOSE + b"\r\n" + BEGIN + END, "purpose"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\nx" + END, "body"),
        (b"--b\r\nX: " + b"x" * 9000, "body"),
    ],
)
def test_a_form_that_is_none_leaves_nothing(tenants: list[httpx.Client], body: bytes, param: str) -> None:
    http, _ = tenants
    before = http.get("/v1/files").json()
    answer = http.post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert_error(answer, 400, "malformed_request" if param == "body" else "field_out_of_range", param=param)
    assert http.get("/v1/files").json() == before
