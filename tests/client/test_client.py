"""Both clients against a real server."""

from __future__ import annotations

import time

import pytest

import client
from client import Djinn
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


def test_a_conversation_sends_only_what_is_new(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        first = session.generate(token_ids=[5] * 40, max_tokens=8, ignore_eos=True)
        second = session.generate(token_ids=[6] * 10, max_tokens=2, ignore_eos=True)
    assert first.usage.prompt_tokens == 40
    assert second.usage.prompt_tokens == 40 + 8 + 10
    assert second.usage.cached_tokens >= 40


def test_messages(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        turn = session.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=2, ignore_eos=True)
    assert turn.finish_reason == "length"


def test_leaving_a_stream_cancels_its_turn(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        with session.stream(prompt="x", max_tokens=400, ignore_eos=True) as stream:
            next(iter(stream))
        assert _wait_until_idle(session).tokens < 400
        with pytest.raises(RuntimeError):
            _ = stream.turn


def _wait_until_idle(session: client.Session) -> client.SessionInfo:
    deadline = time.monotonic() + 10
    while session.refresh().state != "idle":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return session.info


def test_cancelling_from_elsewhere_ends_the_stream_with_what_there_is(djinn: Djinn, server_url: str) -> None:
    with (
        djinn.sessions.create() as session,
        Djinn(server_url, timeout=30) as elsewhere,
        session.stream(prompt="x", max_tokens=400, ignore_eos=True) as stream,
    ):
        events = iter(stream)
        seen = list(next(events).token_ids)
        assert elsewhere.sessions.get(session.id).cancel().state == "idle"
        seen += [token_id for event in events for token_id in event.token_ids]
    assert stream.turn.finish_reason == "cancelled"
    assert 0 < len(seen) < 400
    assert stream.turn.token_ids == tuple(seen)


def test_fork_and_rewind(djinn: Djinn) -> None:
    with djinn.sessions.create(metadata={"name": "parent"}) as parent:
        parent.generate(token_ids=[7] * 20, max_tokens=4, ignore_eos=True)
        with parent.fork() as child:
            assert child.id != parent.id
            assert child.info.tokens == 24
            assert child.rewind(10).tokens == child.info.tokens == 10
        assert parent.refresh().tokens == 24


def test_the_history_is_what_was_sent_and_generated(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        turn = session.generate(prompt="Hello", max_tokens=4, ignore_eos=True)
        history = session.history()
        assert history.token_ids[-4:] == turn.token_ids
        assert history.tokens == len(history.token_ids) == session.refresh().tokens
        assert "Hello" in history.text
        assert session.rewind(3).tokens == 3
        assert session.history().token_ids == history.token_ids[:3]
        session.generate(token_ids=[5, 6], max_tokens=0)
        assert session.history().token_ids == (*history.token_ids[:3], 5, 6)


def test_a_session_that_is_gone_is_closed(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        session.close()
    session.close()


def test_the_blocks_own_error_comes_before_that_of_closing(unused_tcp_port: int, djinn: Djinn) -> None:
    info = djinn.sessions.create().info
    with Djinn(f"http://127.0.0.1:{unused_tcp_port}") as nobody:
        session = client.Session(nobody.sessions._transport, info)
        with pytest.raises(ZeroDivisionError), session:
            raise ZeroDivisionError
        with pytest.raises(client.ConnectionFailed), session:
            pass


async def test_the_blocks_own_error_comes_before_that_of_closing_asyncio(unused_tcp_port: int, djinn: Djinn) -> None:
    info = djinn.sessions.create().info
    async with client.AsyncDjinn(f"http://127.0.0.1:{unused_tcp_port}") as nobody:
        session = client.AsyncSession(nobody.sessions._transport, info)
        with pytest.raises(ZeroDivisionError):
            async with session:
                raise ZeroDivisionError
        with pytest.raises(client.ConnectionFailed):
            async with session:
                pass


def test_listing_by_tier(djinn: Djinn) -> None:
    with djinn.sessions.create() as used, djinn.sessions.create() as empty:
        used.generate(token_ids=[9] * 20, max_tokens=1)
        on_device = {session.id for session in djinn.sessions.list(tier="device")}
        assert used.id in on_device
        assert empty.id not in on_device


def test_guaranteed_sessions_are_admitted_until_the_reserve_is_used_up() -> None:
    def admit_five(djinn: Djinn) -> None:
        for _ in range(5):  # of which the device holds 4
            assert djinn.sessions.create(residency="guaranteed").info.residency == "guaranteed"

    with serve() as url, Djinn(url) as djinn:
        with pytest.raises(client.RateLimited):
            admit_five(djinn)
        assert djinn.sessions.create().info.residency == "best_effort"


def test_listing_walks_all_pages(djinn: Djinn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.calls.PAGE_SIZE", 3)
    sessions = [djinn.sessions.create(metadata={"number": str(number)}) for number in range(7)]
    try:
        mine = {session.id for session in sessions}
        listed = [session for session in djinn.sessions.list(state="idle") if session.id in mine]
        assert [session.info.metadata["number"] for session in listed] == [str(number) for number in range(7)]
        assert not mine & {session.id for session in djinn.sessions.list(state="running")}
    finally:
        for session in sessions:
            session.close()


def test_what_the_server_says_about_itself(djinn: Djinn) -> None:
    assert djinn.health().status == "ok"
    (model,) = djinn.models()
    assert (model.id, model.max_model_len, model.layers, model.hidden_size) == ("tiny-llama", 1024, 4, 64)
    with djinn.sessions.create() as session:
        session.generate(token_ids=[1] * 40, max_tokens=1)
        assert session.refresh().kv.tier == "device"
        assert djinn.memory().data.device.owned_bytes >= session.info.kv.device_bytes > 0


def test_errors_that_the_server_tells(djinn: Djinn) -> None:
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
    with pytest.raises(client.NotFound):
        session.refresh()
    with pytest.raises(client.NotFound):
        djinn.sessions.get("ses_none")


def test_a_second_turn_at_the_same_time_is_a_conflict(djinn: Djinn) -> None:
    with djinn.sessions.create() as session, session.stream(prompt="x", max_tokens=400, ignore_eos=True) as stream:
        next(iter(stream))
        with pytest.raises(client.Conflict, match="running"):
            session.generate(prompt="y", max_tokens=1)


def test_keys() -> None:
    with serve(api_keys=("secret",)) as url, Djinn(url) as stranger, Djinn(url, api_key="secret") as known:
        with pytest.raises(client.Unauthorized):
            stranger.sessions.create()
        assert stranger.health().status == "ok"
        with known.sessions.create() as session:
            assert session.generate(prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_a_key_may_have_any_letters() -> None:
    with serve(api_keys=("schlüssel-ж",)) as url, Djinn(url, api_key="schlüssel-ж") as djinn:
        djinn.sessions.create().close()


def test_a_full_server_says_when_to_come_back() -> None:
    with serve(max_sessions=1) as url, Djinn(url) as djinn, djinn.sessions.create():
        with pytest.raises(client.RateLimited) as limited:
            djinn.sessions.create()
        assert limited.value.code == "session_limit"
        assert limited.value.retry_after is not None
