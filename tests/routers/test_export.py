"""Sessions as files: what leaves one server goes on in another, and nothing else gets in."""

import asyncio
import hashlib
import socket
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load
from starlette.types import Message

from app.domain.errors import SessionLimit
from app.domain.values import SessionState
from app.exports import snapshot
from app.main import load_app
from app.routers.dependencies import Services
from tests.conftest import ServeWith
from tests.errors import assert_error
from tests.routers.breakpoints.pausing import open_session
from tests.routers.forging import IMPORT, imported, with_about, with_kv_of_ones
from tests.routers.generating import streaming
from tests.serving import serve, tiny_settings
from tests.waiting import wait_until

PROMPT = [5 + index * 7 % 200 for index in range(50)]
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def generate(http: httpx.Client, session: str, token_ids: list[int]) -> dict[str, Any]:
    response = http.post(f"{session}/generate", json={"token_ids": token_ids, **GREEDY})
    turn: dict[str, Any] = response.raise_for_status().json()
    return turn


def export(http: httpx.Client, session: str) -> bytes:
    return http.get(f"{session}/export").raise_for_status().content


@pytest.fixture
def used(http: httpx.Client) -> Iterator[str]:
    """Path of a session with a turn behind it."""
    session = open_session(http, metadata={"task": "é"}, ttl_s=3600)
    generate(http, session, PROMPT)
    yield session
    http.delete(session)


def test_a_session_goes_on_elsewhere(http: httpx.Client, serve_with: ServeWith, used: str, tmp_path: Path) -> None:
    there = serve_with(state_dir=tmp_path)
    answer = there.post(IMPORT, content=export(http, used))
    assert answer.status_code == 201, answer.text
    copy, original = answer.json(), http.get(used).json()
    assert copy["id"] != original["id"]
    assert (copy["state"], copy["tokens"], copy["metadata"]) == ("idle", original["tokens"], original["metadata"])
    assert copy["expires_at"] == pytest.approx(time.time() + 3600, abs=10)
    here_turn = generate(http, used, [9, 8])
    there_turn = generate(there, f"/v1/sessions/{copy['id']}", [9, 8])
    assert (there_turn["token_ids"], there_turn["usage"]) == (here_turn["token_ids"], here_turn["usage"])
    assert there_turn["usage"]["cached_tokens"] >= len(PROMPT)
    assert there_turn["usage"]["tokens_recomputed"] == 0


def test_a_server_without_a_disk_tier_recomputes_the_kv(http: httpx.Client, serve_with: ServeWith, used: str) -> None:
    there = serve_with(state_dir=None)
    found = generate(there, imported(there, export(http, used)), [9, 8])["token_ids"]
    assert found == generate(http, used, [9, 8])["token_ids"]


def test_the_file_is_safetensors_with_history_and_kv(http: httpx.Client) -> None:
    session = open_session(http)
    generated = generate(http, session, PROMPT)["token_ids"]
    answer = http.get(f"{session}/export")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == f'attachment; filename="{session.rpartition("/")[2]}.safetensors"'
    assert int(answer.headers["content-length"]) == len(answer.content)
    tensors = load(answer.content)
    assert tensors["token_ids"].tolist() == PROMPT + generated
    assert tensors["kv"].shape[0] * tensors["kv"].shape[4] >= len(PROMPT)
    assert hashlib.sha256(answer.content[:-32]).digest() == tensors["sha256"].tobytes()


def test_an_empty_session_can_be_taken_along(http: httpx.Client) -> None:
    session = imported(http, export(http, open_session(http)))
    assert http.get(session).json()["tokens"] == 0
    generate(http, session, PROMPT)


def test_a_session_with_a_turn_in_it_is_not_exported(http: httpx.Client, session: str, slow_steps: None) -> None:
    with streaming(http, session, token_ids=PROMPT, max_tokens=900, ignore_eos=True):
        exported = http.get(f"{session}/export")
    assert "cannot export" in assert_error(exported, 409, "wrong_state")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"seed": 1}, "model"),
        ({"dtype": "bfloat16"}, "its KV is float32, and this server keeps KV as bfloat16: see --kv-dtype"),
        ({"block_size": 8}, "KV blocks"),
    ],
)
def test_a_file_of_another_model_or_layout_is_refused(
    http: httpx.Client, serve_with: ServeWith, used: str, settings: dict[str, Any], says: str
) -> None:
    answer = serve_with(**settings).post(IMPORT, content=export(http, used))
    assert says in assert_error(answer, 422, "bad_export")


def test_a_file_that_says_nothing_gets_the_time_to_live_of_any_session(http: httpx.Client, used: str) -> None:
    answer = http.post(IMPORT, content=with_about(export(http, used), "{}"))
    assert answer.json()["expires_at"] == pytest.approx(time.time() + 30 * 24 * 3600, abs=60)


def test_what_no_server_would_import_is_not_exported(
    http: httpx.Client, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_LABEL_BYTES", 20)
    assert "may have" in assert_error(http.get(f"{used}/export"), 413, "request_too_large")


def test_forged_kv_reaches_nobody_but_the_forger(http: httpx.Client, tmp_path: Path) -> None:
    prompt = PROMPT + PROMPT
    expected = generate(http, open_session(http), prompt)["token_ids"]
    honest = open_session(http)
    http.post(f"{honest}/generate", json={"token_ids": prompt, "max_tokens": 0}).raise_for_status()
    forged = with_kv_of_ones(export(http, honest))
    with serve(state_dir=tmp_path) as url, httpx.Client(base_url=url, timeout=30) as there:
        bad = imported(there, forged)
        assert generate(there, bad, PROMPT)["usage"]["cached_tokens"] == len(prompt)
        assert generate(there, open_session(there), prompt)["token_ids"] == expected
        unused = imported(there, forged)
    with serve(state_dir=tmp_path) as url, httpx.Client(base_url=url, timeout=30) as there:
        for session in (bad, unused):
            generate(there, session, [9])
            assert generate(there, open_session(there), prompt)["token_ids"] == expected


def test_an_import_without_a_place_is_refused_at_once(http: httpx.Client, serve_with: ServeWith, used: str) -> None:
    full = serve_with(max_sessions=1)
    full.post("/v1/sessions")
    answer = full.post(IMPORT, content=export(http, used))
    assert_error(answer, 429, "session_limit")
    assert int(answer.headers["retry-after"]) >= 1
    with socket.create_connection((full.base_url.host, full.base_url.port or 0), timeout=10) as only_head:
        only_head.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n" % IMPORT.encode())
        assert only_head.recv(1000).startswith(b"HTTP/1.1 429")


def test_nothing_stays_on_the_way(serve_with: ServeWith, tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    (folder / "djinn-left-by-a-crash").mkdir(parents=True)
    http = serve_with(state_dir=tmp_path, kv_device=32 << 20)
    session = open_session(http)
    generate(http, session, [5] * 900)
    content = export(http, session)
    assert http.post(IMPORT, content=content).status_code == 201
    assert_error(http.post(IMPORT, content=content[:-1]), 422, "bad_export")
    wait_until(lambda: not list(folder.iterdir()))
    with http.stream("GET", f"{session}/export") as cut_off:
        next(cut_off.iter_raw(1))
    wait_until(lambda: not list(folder.iterdir()))
    with socket.create_connection((http.base_url.host, http.base_url.port or 0)) as half:
        half.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\nbegin" % IMPORT.encode())
        time.sleep(0.2)
    wait_until(lambda: not list(folder.iterdir()))


async def test_a_session_gives_way_to_no_other_before_its_export_has_been_sent() -> None:
    app = load_app(tiny_settings(max_sessions=1))
    async with app.router.lifespan_context(app):
        services: Services = app.state.services
        session = services.bound_sessions.open_unnamed(None, AsyncExitStack(), metadata={})
        sent: list[int] = []
        asked: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Message:
            return asked.pop() if asked else await asyncio.Future()  # the client stays

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])
            with pytest.raises(SessionLimit):
                services.sessions.create()

        path = f"/v1/sessions/{session.id}/export"
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
        await app(scope, receive, send)
        assert sent == [200]
        services.sessions.create()
        assert session.state is SessionState.CLOSED


@pytest.mark.parametrize("about", ["[" * 100_000, '{"ttl_s": 0}', '{"owner": "someone"}'])
def test_labels_that_no_session_can_have_are_refused(http: httpx.Client, used: str, about: str) -> None:
    content = with_about(export(http, used), about)
    message = assert_error(http.post(IMPORT, content=content), 422, "bad_export")
    assert "metadata, ttl_s" in message
    assert ": :" not in message
