"""Both clients against a real server: turns, sessions, what a session says that it does, files, and cancelled calls."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import client
from client import AsyncDjinn, AsyncSession, Djinn, transport
from client.calls import TurnOptions
from client.edge import Connection
from client.transport import Transport
from tests.client.conftest import NOBODY, SESSION, AnswerWith, wait_until_idle
from tests.serving import serve


def test_a_turn_whole_and_streamed_are_the_same(djinn: Djinn) -> None:
    with djinn.sessions.create() as one, djinn.sessions.create() as other:
        whole = one.generate(prompt="Hello", max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
        with other.stream(prompt="Hello", max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1) as stream:
            events = list(stream)
        again = other.generate(token_ids=[], max_tokens=1)
    assert stream.turn.model_copy(update={"usage": whole.usage}) == whole
    assert "".join(event.text for event in events) == whole.text
    assert tuple(token_id for event in events for token_id in event.token_ids) == whole.token_ids
    assert len(whole.token_ids) == whole.usage.completion_tokens == 12
    assert [found.token_id for found in whole.logprobs or ()] == list(whole.token_ids)
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens + 12


def test_leaving_a_stream_cancels_its_turn(djinn: Djinn, slow_steps: None) -> None:
    with djinn.sessions.create() as session:
        with session.stream(prompt="x", max_tokens=900, ignore_eos=True) as stream:
            next(iter(stream))
        assert wait_until_idle(session).tokens < 900
        with pytest.raises(RuntimeError):
            _ = stream.turn


@pytest.mark.usefixtures("slow_steps")
def test_cancelling_from_elsewhere_ends_the_stream_with_what_there_is(djinn: Djinn, server_url: str) -> None:
    with (
        djinn.sessions.create() as session,
        Djinn(server_url, timeout=30) as elsewhere,
        session.stream(prompt="x", max_tokens=900, ignore_eos=True) as stream,
    ):
        events = iter(stream)
        seen = list(next(events).token_ids)
        assert elsewhere.sessions.get(session.id).cancel().state == "idle"
        seen += [token_id for event in events for token_id in event.token_ids]
    assert stream.turn.finish_reason == "cancelled"
    assert 0 < len(seen) < 900
    assert stream.turn.token_ids == tuple(seen)


def test_the_blocks_own_error_comes_before_that_of_closing() -> None:
    with closing(Transport(Connection(NOBODY, None, timeout=5))) as nobody:
        session = client.Session(nobody, SESSION)
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
        with pytest.raises(client.ConnectionFailed), session:
            pass


def test_errors_that_the_server_tells(djinn: Djinn, slow_steps: None) -> None:
    with djinn.sessions.create() as session:
        with pytest.raises(client.Unprocessable, match="temperature") as unprocessable:
            session.generate(prompt="x", temperature=-1.0)
        assert (unprocessable.value.status, unprocessable.value.param) == (422, "temperature")
        assert unprocessable.value.code == "field_out_of_range"
        assert unprocessable.value.request_id
        with pytest.raises(client.BadRequest) as too_long, session.stream(token_ids=[1] * 2000):
            pytest.fail("a turn that does not fit has begun")
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(client.Conflict):
            session.cancel()
        with session.stream(prompt="x", max_tokens=900, ignore_eos=True) as stream:
            next(iter(stream))
            with pytest.raises(client.Conflict, match="running"):
                session.generate(prompt="y", max_tokens=1)
    for ask in (session.refresh, lambda: djinn.sessions.get("ses_none")):
        with pytest.raises(client.NotFound):
            ask()


def test_what_a_server_with_a_key_and_little_room_refuses() -> None:
    """A key may have any letters."""
    with serve(api_keys=("schlüssel-ж",), max_sessions=5) as url, Djinn(url) as stranger:
        with pytest.raises(client.Unauthorized):
            stranger.sessions.create()
        assert stranger.health().status == "ok"
        with Djinn(url, api_key="schlüssel-ж", max_retries=0) as known, ExitStack() as sessions:
            assert known.sessions.create().generate(prompt="x", max_tokens=1).usage.completion_tokens == 1
            for _ in range(3):  # as many as the device holds with the first
                sessions.enter_context(known.sessions.create(residency="guaranteed"))
            with pytest.raises(client.RateLimited):
                known.sessions.create(residency="guaranteed")
            assert sessions.enter_context(known.sessions.create()).info.residency == "best_effort"
            with pytest.raises(client.RateLimited) as limited:
                known.sessions.create()
            assert limited.value.code == "session_limit"
            assert limited.value.retry_after


@pytest.mark.parametrize("resume_in_ms", [None, 20])
def test_around_a_tool_call_the_phase_is_io_wait_and_then_ready(djinn: Djinn, resume_in_ms: float | None) -> None:
    with djinn.sessions.create() as session:
        session.generate(token_ids=[7] * 40, max_tokens=1)
        with session.io_wait(resume_in_ms=resume_in_ms) as change:
            assert change.phase == session.refresh().phase == "io_wait"
            assert change.moving is None or change.moving.bytes > 0
        assert session.refresh().phase == "ready"
        turn = session.generate(token_ids=[8], max_tokens=1)
        assert (session.refresh().phase, turn.usage.tokens_recomputed) == ("compute", 0)


async def test_a_tool_call_that_is_cancelled_leaves_the_session_ready(server_url: str) -> None:
    async with client.AsyncDjinn(server_url, timeout=30) as djinn, await djinn.sessions.create() as session:

        async def use_tool() -> None:
            async with session.io_wait():
                begun.set()
                await asyncio.sleep(60)

        begun, using = asyncio.Event(), asyncio.create_task(use_tool())
        await begun.wait()
        using.cancel()
        with pytest.raises(asyncio.CancelledError):
            await using
        assert (await session.refresh()).phase == "ready"


def test_the_tools_own_error_comes_before_that_of_the_signal(djinn: Djinn) -> None:
    def fail(session: client.Session, *, close: bool) -> None:
        if close:
            session.close()
        raise ZeroDivisionError

    session = djinn.sessions.create()
    with pytest.raises(ZeroDivisionError), session.io_wait(resume_in_ms=60_000):
        fail(session, close=False)
    assert session.refresh().phase == "ready"
    with pytest.raises(ZeroDivisionError), session.io_wait():
        fail(session, close=True)
    session = djinn.sessions.create()
    with pytest.raises(client.NotFound), session.io_wait():
        session.close()


def test_a_session_comes_back_from_its_file(djinn: Djinn, tmp_path: Path) -> None:
    with djinn.sessions.create(metadata={"task": "7"}) as used:
        used.generate(token_ids=list(range(5, 45)), max_tokens=4, temperature=0, ignore_eos=True)
        used.export_to(tmp_path / "session")
        assert list(tmp_path.iterdir()) == [tmp_path / "session"]
        with djinn.sessions.import_from(str(tmp_path / "session")) as back:
            assert back.id != used.id
            assert (back.info.metadata, back.info.tokens) == ({"task": "7"}, used.refresh().tokens)
            asked: TurnOptions = {"token_ids": [9], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert back.generate(**asked).token_ids == used.generate(**asked).token_ids


def test_what_cannot_be_exported_leaves_no_file(djinn: Djinn, tmp_path: Path) -> None:
    session = djinn.sessions.create()
    session.close()
    (tmp_path / "session").write_bytes(b"before")
    with pytest.raises(client.NotFound):
        session.export_to(tmp_path / "session")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("session", b"before")]
    with pytest.raises(client.Unprocessable):
        djinn.sessions.import_from(tmp_path / "session")
    with pytest.raises(FileNotFoundError):
        djinn.sessions.import_from(tmp_path / "none")


def test_a_broken_download_leaves_no_file(answer_with: AnswerWith, tmp_path: Path) -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    with (
        closing(Transport(Connection(answer_with(half), None, timeout=5))) as broken,
        pytest.raises(client.ConnectionLost),
    ):
        client.Session(broken, SESSION).export_to(tmp_path / "session")
    assert not list(tmp_path.iterdir())


ATTEMPTS = 25
APART_S = 0.0005
"""How much longer one attempt waits than the one before: some cancel before the request, some after the answer."""

Open = Callable[[], Awaitable[AsyncSession]]


async def cancel_openings(open_session: Open) -> list[AsyncSession]:
    """Cancel one opening after another at a later moment each; what was opened in time."""
    opened = []
    for attempt in range(ATTEMPTS):
        opening = asyncio.ensure_future(open_session())
        await asyncio.sleep(attempt * APART_S)
        opening.cancel()
        try:
            opened.append(await opening)
        except asyncio.CancelledError:
            continue
    return opened


async def ids(djinn: AsyncDjinn) -> set[str]:
    return {session.id async for session in djinn.sessions.list()}


async def test_sessions_whose_opening_is_cancelled_are_closed(server_url: str, tmp_path: Path) -> None:
    file = tmp_path / "session.safetensors"
    async with AsyncDjinn(server_url, timeout=30) as djinn, await djinn.sessions.create() as parent:
        await parent.generate(token_ids=[1, 2, 3], max_tokens=1)
        await parent.export_to(file)
        before = await ids(djinn)
        ways: list[Open] = [djinn.sessions.create, parent.fork, lambda: djinn.sessions.import_from(file)]
        for way in ways:
            for session in await cancel_openings(way):
                await session.close()
            assert await ids(djinn) == before


async def test_sessions_whose_closing_is_cancelled_are_closed(server_url: str) -> None:
    async with AsyncDjinn(server_url, timeout=30) as djinn:
        before = await ids(djinn)
        for steps in range(1, ATTEMPTS):
            session = await djinn.sessions.create()
            closing = asyncio.ensure_future(session.close())
            for _ in range(steps):
                await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
        assert await ids(djinn) == before


async def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ABANDON_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncDjinn(url, timeout=30) as djinn:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await djinn.sessions.create()
