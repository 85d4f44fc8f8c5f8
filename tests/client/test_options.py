"""Where a client finds its server, how long it waits, what it sends through, and what it shows."""

import asyncio
import math
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from pydantic import TypeAdapter

import client
from app.wire import history
from client import AsyncDjinn, Djinn, Event, raw_responses
from client.calls import UNSET
from client.live import EventKind
from tests.client.conftest import GREEDY, paused, wait_until_idle
from tests.processes import serve_process
from tests.serving import serve

LONG: dict[str, Any] = {"token_ids": [5], "max_tokens": 900, "ignore_eos": True}


def test_the_environment_says_where_the_server_is_and_which_key_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(api_keys=("sesame",)) as url:
        monkeypatch.setenv("DJINN_BASE_URL", url)
        monkeypatch.setenv("DJINN_API_KEY", "sesame")
        with Djinn() as djinn, paused(djinn) as session:
            (armed,) = session.breakpoints()
            shown = [repr(each) for each in (djinn, djinn.vectors, session, armed, session.checkpoint())]
        assert shown == [
            f"Djinn({url!r})",
            f"Vectors({url!r})",
            f"Session(id={session.id!r}, state='idle', tokens=0)",
            f"Breakpoint(id={armed.id!r}, action='pause', layers=(1,))",
            "Checkpoint(layer=1, first=0, end=20)",
        ]
        with Djinn(api_key="simsim") as wrong, pytest.raises(client.Unauthorized):
            wrong.models()
        with Djinn("http://user:sesame@127.0.0.1:1", max_retries=0) as nobody:
            with pytest.raises(client.ConnectionFailed) as failed:
                nobody.health()
            assert "sesame" not in f"{nobody!r} {failed.value}"


def test_a_call_has_a_timeout_of_its_own(djinn: Djinn, slow_steps: None) -> None:
    with djinn.sessions.create() as session:
        hasty = djinn.with_options(timeout=0.15, max_retries=1).sessions.get(session.id, timeout=30)
        for asked, timeout in ((session, 0.15), (session.with_options(timeout=0.15), UNSET), (hasty, UNSET)):
            with pytest.raises(client.Timeout):
                asked.generate(**LONG, timeout=timeout)
            assert wait_until_idle(session).tokens < 900
            session.rewind(0)
        assert session.generate(**GREEDY, timeout=None).status == "finished"
        for wrong in (0, -1, math.nan):
            with pytest.raises(ValueError, match="timeout must be more than 0"):
                session.refresh(timeout=wrong)
            with pytest.raises(ValueError, match="timeout must be more than 0"):
                djinn.with_options(timeout=wrong)
        djinn.with_options(max_retries=0).close()
        assert session.refresh().state == "idle", "the first client's connections stay open"


def test_an_own_http_client_carries_every_request_and_stays_open(server_url: str) -> None:
    seen: list[httpx.Request] = []
    hooks: dict[str, list[Any]] = {"request": [seen.append]}
    with httpx.Client(headers={"X-Team": "a"}, timeout=1e-6, event_hooks=hooks) as http:
        with Djinn(server_url, api_key="k", http_client=http) as djinn, djinn.sessions.create() as session:
            assert session.generate(**GREEDY).status == "finished"
        sent = [(request.headers["x-team"], request.headers["authorization"]) for request in seen]
        assert sent == 3 * [("a", "Bearer k")]
        assert not http.is_closed

    async def ask() -> bool:
        async with httpx.AsyncClient() as http:
            async with AsyncDjinn(server_url, http_client=http) as djinn:
                await djinn.health()
            return http.is_closed

    assert not asyncio.run(ask())


def test_the_status_and_headers_of_answers_can_be_seen(djinn: Djinn) -> None:
    with djinn.sessions.create() as session, raw_responses() as responses:
        session.generate(**GREEDY)
        with session.stream(**GREEDY) as stream:
            list(stream)
        with pytest.raises(client.NotFound) as missing:
            djinn.sessions.get("ses_none")
    assert [response.status_code for response in responses] == [200, 200, 404]
    assert responses[2].headers["x-request-id"] == missing.value.request_id
    assert responses[0].json()["status"] == "finished"


def test_names_pages_and_what_the_server_tells_about_itself(djinn: Djinn, server_url: str) -> None:
    call = {"model": "tiny-llama", "prompt": "x", "max_tokens": 1}
    httpx.post(f"{server_url}/v1/completions", json=call, headers={"X-Session-ID": "conversation 7"}).raise_for_status()
    found = djinn.sessions.find("conversation 7")
    assert found is not None
    with raw_responses() as pages:
        listed = [session.id for session in djinn.sessions.list(page_size=1)]
    assert found.id in listed
    assert len(pages) == len(listed)
    assert found.label({"name": "researcher", "since": "today"}).metadata == {"name": "researcher", "since": "today"}
    assert found.label({"since": None}).metadata == found.refresh().metadata == {"name": "researcher"}
    with pytest.raises(client.Unprocessable):
        found.label({str(number): "x" for number in range(16)})
    found.close()
    assert djinn.sessions.find("conversation 7") is None
    assert djinn.detokenize(djinn.tokenize("Hello", add_special_tokens=False)) == "Hello"
    assert len(djinn.tokenize(messages=[{"role": "user", "content": "Hello"}])) > 1
    estimate = djinn.estimate(1000, bandwidth=1e9)
    assert estimate.kv_bytes == estimate.blocks * djinn.memory().data.block_bytes
    assert estimate.transfer_ms["out"] == pytest.approx(estimate.kv_bytes / 1e6)
    fits = djinn.capacity(context_tokens=1000, prompt_tokens=8, completion_tokens=8, tools_s=60)
    room = max(0, (fits.limits[fits.limit] or 0) - fits.agents)
    assert (fits.more, fits.kv_bytes) == (room, estimate.kv_bytes)
    assert (djinn.health().status, djinn.ready().status, djinn.version().model) == ("ok", "ready", "tiny-llama")
    (model,) = djinn.models()
    assert (model.id, model.max_model_len, model.layers, model.hidden_size) == ("tiny-llama", 1024, 4, 64)
    with djinn.sessions.create() as session:
        session.generate(token_ids=[1] * 40, max_tokens=1)
        assert [entry.kind for entry in session.timeline().data if entry.kind != "moved"] == ["turn", "opened"]
        assert djinn.activity().minutes[-1].turns >= 1
        assert session.refresh().kv.tier == "device"
        assert not djinn.sessions.closed(session.id).data
        assert djinn.memory().data.device.owned_bytes >= session.info.kv.device_bytes > 0
        with pytest.raises(client.Conflict, match="no cluster"):
            session.move("b")


def test_a_sessions_events_are_told_until_it_is_closed(djinn: Djinn) -> None:
    with djinn.sessions.create() as other, djinn.sessions.create() as session, session.events() as events:
        first = next(iter(events))
        assert first.sessions is not None
        assert [info.id for info in first.sessions] == [session.id]
        other.generate(**GREEDY)
        session.break_at(layer=1, once=True)
        session.generate(**GREEDY)
        session.checkpoint().edit(scale=1.0)
        session.resume()
        session.close()
        told = list(events)
    assert {event.session_id for event in told if event.kind != "tokens"} == {session.id}
    kinds = [event.kind for event in told if event.kind not in ("session", "tokens")]
    assert kinds == ["breakpoints", "turn", "breakpoints", "pause", "edit", "turn"]
    assert [event.status for event in told if event.kind == "turn"] == ["begun", "finished"]
    assert told[-1].change == "closed"


def test_an_event_has_every_field_of_the_server() -> None:
    news = (history.SnapshotView, history.SessionNews, history.TurnNews, history.TokensNews, history.PauseNews)
    fields = {name for kind in (*news, history.BreakpointsNews, history.EditNews) for name in kind.model_fields}
    assert set(Event.model_fields) == fields | {"kind", "id", "memory", "findings"}
    kinds = TypeAdapter(history.LiveEvent).json_schema()["discriminator"]["mapping"]
    assert set(kinds) == set(get_args(EventKind))


@pytest.mark.long
def test_events_go_on_after_the_server_was_killed_and_started_again(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state") as first:
        port = httpx.URL(first.url).port
        with Djinn(first.url, timeout=30, max_retries=6) as djinn, djinn.events() as events:
            assert next(events).kind == "snapshot"
            session = djinn.sessions.create()
            before = next(event for event in events if event.change == "opened")
            first.kill()
            with serve_process(tmp_path / "state", "--port", str(port)):
                again = next(event for event in events if event.kind == "snapshot")
                assert [info.id for info in again.sessions or ()] == [session.id] == [before.session_id]
                assert session.generate(**GREEDY).status == "finished"
