"""`/v1/batches` and `/v1/files`, by OpenAI's SDK and by clients that do it wrong: each line is answered as the same
call is, once, and behind everybody else's.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.batches import requests, runner
from app.batches.requests import BatchBody
from app.domain.errors import DiskShort, WrongState
from app.domain.values import SamplingParams, StopRule
from app.sessions.turns import TurnRequest
from app.text.generation import TextRule
from app.web.multipart import FormPart, form_parts
from tests.errors import assert_error
from tests.processes import metric, serve_process
from tests.serving import running_services, serve
from tests.waiting import until, wait_until

MODEL = "tiny-llama"
CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
    "/v1/completions": {"prompt": "Once", "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "store": False},
    "/v1/embeddings": {"input": "Hi"},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as url:
        yield url


@contextmanager
def sdk_of(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, _strict_response_validation=True) as sdk:
        yield sdk


@pytest.fixture
def sdk(url: str) -> Iterator[Any]:
    with sdk_of(url) as sdk:
        yield sdk


def lines(bodies: list[dict[str, Any]], path: str) -> bytes:
    """The file of a batch: custom ids count from 0."""
    asked = (
        {"custom_id": str(index), "method": "POST", "url": path, "body": {"model": MODEL, **body}}
        for index, body in enumerate(bodies)
    )
    return "\n".join(map(json.dumps, asked)).encode()


def begin(sdk: Any, content: bytes, path: str = CHAT) -> Any:
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint=path, completion_window="24h", metadata={"of": "test"})


def over(sdk: Any, batch: Any) -> Any:
    wait_until(lambda: sdk.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"))
    return sdk.batches.retrieve(batch.id)


def results(sdk: Any, file_id: str | None) -> dict[str, Any]:
    """The entries of a file of results by their custom ids, which are all different."""
    entries = [] if file_id is None else [json.loads(line) for line in sdk.files.content(file_id).text.splitlines()]
    found = {entry["custom_id"]: entry for entry in entries}
    assert len(found) == len(entries)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_each_line_is_answered_as_the_call_is(sdk: Any, url: str, path: str) -> None:
    body = BODIES[path]
    expected = httpx.post(f"{url}{path}", json={"model": MODEL, **body}).json()
    used = [each["used_at"] for each in httpx.get(f"{url}/v1/sessions").json()["data"]]
    batch = over(sdk, begin(sdk, lines([body, {**body, "temperature": -1, "dimensions": 100_000}, body], path), path))
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"of": "test"})
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    answered, refused = results(sdk, batch.output_file_id), results(sdk, batch.error_file_id)
    assert used == [each["used_at"] for each in httpx.get(f"{url}/v1/sessions").json()["data"]]  # clients' alone
    for entry in (answered["0"], answered["2"]):
        assert (entry["error"], entry["response"]["status_code"]) == (None, 200)
        answers = (entry["response"]["body"], expected)
        found, same = ([e.get("data"), e.get("choices"), *(i["content"] for i in e.get("output", ()))] for e in answers)
        assert found == same
    response = refused["1"]["response"]
    assert (response["status_code"], response["body"]["error"]["type"]) == (400, "invalid_request_error")
    assert next(iter(sdk.batches.list(limit=1))) == batch


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"", "empty_file", None),
        (b"{", "invalid_json_line", None),
        ('{"\u202e": 1, "\u202e": 2}'.encode(), "invalid_json_line", None),
        (lines([{"model": "gpt-4o"}], CHAT), "model_not_found", "model"),
        (lines([{"stream": True}], CHAT), "invalid_request", "body"),
        (lines([{}], "/v1/completions"), "url_mismatch", "url"),
        (lines([{}], CHAT).replace(b"POST", b"GET"), "invalid_method", "method"),
        (lines([{}], CHAT).replace(b"custom_id", b"customId"), "missing_required_parameter", "custom_id"),
        (lines([{}], CHAT) + b"\n" + lines([{}], CHAT), "duplicate_custom_id", "custom_id"),
        (b'{"custom_id": "' + b"x" * (9 << 20), "line_too_long", None),
        (lines([{}] * 100, CHAT), "too_many_tasks", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_anything_else_fails_the_batch_and_says_where(
    sdk: Any, line: bytes, code: str, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_LINES", 100)
    batch = over(sdk, begin(sdk, lines([{}], CHAT).replace(b'"0"', b'"first"') + b"\n" + line if line else b"\n"))
    assert (batch.status, batch.output_file_id) == ("failed", None)
    [problem] = batch.errors.data
    where = None if code in ("empty_file", "too_many_tasks") else 3 if code == "duplicate_custom_id" else 2
    assert (problem.code, problem.param, problem.line, "\u202e" in problem.message) == (code, param, where, False)


def test_a_cancelled_batch_keeps_what_is_done(sdk: Any) -> None:
    short, long = {**BODIES[CHAT], "max_tokens": 1}, {**BODIES[CHAT], "max_tokens": 900, "ignore_eos": True}
    batch = begin(sdk, lines([short, *[long] * 30], CHAT))
    wait_until(lambda: sdk.batches.retrieve(batch.id).request_counts.completed >= 1)
    with pytest.raises(openai.ConflictError):
        sdk.files.delete(batch.input_file_id)
    assert sdk.batches.cancel(batch.id).status == "cancelling"
    batch = over(sdk, batch)
    assert batch.status == "cancelled"
    answered, left = results(sdk, batch.output_file_id), results(sdk, batch.error_file_id)
    assert answered.keys() | left.keys() == set(map(str, range(31)))
    assert not answered.keys() & left.keys()
    assert {entry["error"]["code"] for entry in left.values()} == {"batch_cancelled"}
    sdk.files.delete(batch.input_file_id)
    with pytest.raises(openai.ConflictError):
        sdk.batches.cancel(batch.id)


def test_a_server_that_was_killed_goes_on_and_does_no_line_twice(tmp_path: Path) -> None:
    content = lines([{**BODIES[CHAT], "max_tokens": 100, "ignore_eos": True, "seed": n} for n in range(30)], CHAT)
    with serve_process(tmp_path) as server, sdk_of(server.url) as sdk:
        batch = begin(sdk, content)
        wait_until(lambda: sdk.batches.retrieve(batch.id).request_counts.completed >= 3)
        server.kill()
    [empty, part] = sorted((tmp_path / "files").glob("*.part"), key=lambda each: each.stat().st_size)
    empty.write_bytes(b'{"custom_id": "x", "response": null}\n')  # as one that is being cancelled may have
    done = [json.loads(line)["id"] for line in part.read_bytes().splitlines()]
    with part.open("ab") as opened:
        opened.write(b'{"id": "batch_req_half", "custom_')  # as a power cut may leave it
    with serve_process(tmp_path) as server, sdk_of(server.url) as sdk:
        found = over(sdk, batch)
        assert (found.status, found.request_counts.completed, found.request_counts.failed) == ("completed", 30, 0)
        answered = results(sdk, found.output_file_id)
        assert answered.keys() == set(map(str, range(30)))
        assert [entry["id"] for entry in answered.values()][: len(done)] == done
    assert len(done) >= 3


async def test_beside_a_client_one_line_is_under_way() -> None:
    async with running_services() as services, AsyncExitStack() as cleanup:
        table, files, long = services.sessions.table, services.files, {"prompt": "x", "ignore_eos": True}
        async with files.writing(None) as writer:
            await writer.write(lines([{**long, "max_tokens": 60}] * 24, "/v1/completions"))
            file = await writer.keep("in.jsonl", "batch", None)

        def under_way() -> int:
            return sum(session.background and session.under_way for session in table)

        body = BatchBody(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = await services.batches.create(None, body)
        await until(lambda: under_way() > 1)
        assert not table.foreground_runs()
        client = await cleanup.enter_async_context(services.sessions.ephemeral())
        request = TurnRequest([5, 6, 7], SamplingParams(seed=0), StopRule(max_tokens=900), TextRule())
        services.sessions.turns.start(client, request, cleanup)
        await until(lambda: under_way() <= 1)
        seen = []
        while client.under_way:
            seen.append(under_way())
            await asyncio.sleep(0.002)
        assert max(seen) == 1
        await until(lambda: services.batches.find(None, batch.id).status == "completed")


async def test_after_a_restart_a_batch_fails_whose_file_is_lost_or_of_another_model(tmp_path: Path) -> None:
    (folder := tmp_path / "files" / "batches").mkdir(parents=True)
    (folder.parent / "file-other").write_bytes(lines([{"model": "gpt-4o"}], CHAT))
    for name in ("lost", "other"):
        batch = {"id": name, "endpoint": CHAT, "input_file_id": f"file-{name}", "status": "in_progress"}
        about = {"batch": {**batch, "created_at": 1, "expires_at": 1 << 40}, "output_id": name, "error_id": f"e-{name}"}
        (folder / f"{name}.json").write_text(json.dumps({"owner": None, **about}))
    async with running_services(state_dir=tmp_path) as services:
        await until(lambda: all(each.status == "failed" for each in services.batches.owned_by(None)))
        problems = [each.errors.data[0] for each in services.batches.owned_by(None) if each.errors]
    assert {(each.code, "/" in each.message) for each in problems} == {("input_file_lost", 0), ("model_not_found", 0)}


async def test_a_full_disk_delays_the_end_of_a_batch_and_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LONGEST_WAIT_S", 0.01)
    async with running_services() as services:
        batches, files = services.batches, services.files
        files.path("full.part").symlink_to("/dev/full")
        with pytest.raises(DiskShort):
            async with files.writing(None, "full") as writer:
                await writer.write(b"x", at_once=True)
        async with files.writing(None) as writer:
            await writer.write(b"{")
            file = await writer.keep("in.jsonl", "batch", None)
            body = BatchBody(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            asked = batches.create(None, body), files.delete(None, file.id)
            _, refused = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(refused, WrongState)
            (blocked := files.folder / "batches" / f"{batches.owned_by(None)[0].id}.new").mkdir()
            await until(lambda: batches.owned_by(None)[0].status == "failed")
            blocked.rmdir()
            await until(lambda: '"status":"failed"' in blocked.with_suffix(".json").read_text())
            await files.delete(None, file.id)
        assert files.total_bytes == 0


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
