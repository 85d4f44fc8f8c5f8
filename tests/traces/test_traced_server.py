"""The spans of a real server, kept in memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from app.traces import names
from tests.routers.breakpoints.pausing import arm, generate, resume
from tests.routers.generating import GREEDY, streaming, wait_until_idle
from tests.routers.test_phase import CONTEXT, in_tier, wait_for
from tests.serving import serve
from tests.traces.conftest import (
    CALLER,
    COLLECTOR,
    RESUMER,
    Spans,
    assert_nested,
    attribute,
    began,
    ended,
    events,
    named,
)

SECRET = "swordfish"


def open_session(http: httpx.Client) -> str:
    return f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"


def test_a_turn_that_waited_was_restored_paused_and_resumed_is_one_tree(kept: Spans) -> None:
    asked = {**GREEDY, "token_ids": [5], "max_tokens": 4}
    with (
        serve(otlp_endpoint=COLLECTOR, max_running=1, max_draft_tokens=0) as url,
        httpx.Client(base_url=url, timeout=60) as http,
        httpx.Client(base_url=url, timeout=60, headers={"traceparent": CALLER}) as caller,
    ):
        session = open_session(http)
        http.post(f"{session}/generate", json=CONTEXT).raise_for_status()
        http.post(f"{session}/phase", json={"phase": "io_wait"})
        wait_for(http, session, in_tier("host"))
        armed = arm(http, session, once=True, when={"pass": "decode"})
        other, answers = open_session(http), []
        with streaming(http, other, **GREEDY, max_tokens=900) as running:
            next(running)
            waiting = threading.Thread(
                target=lambda: answers.append(caller.post(f"{session}/generate", json=asked)), daemon=True
            )
            waiting.start()
            wait_for(http, session, lambda found: found["state"] != "idle")
        waiting.join(60)
        resumed = http.post(f"{session}/resume", headers={"traceparent": RESUMER})
        usage = http.get(session).json()["usage"]
    (paused,) = answers
    assert (paused.json()["status"], resumed.json()["status"]) == ("paused", "finished")
    _, running_span, span = kept.turns
    assert kept.tree(span) == [("queue", ["restore"]), "prefill", "decode", "pause", "queue", "decode"]
    assert_nested(kept)
    queue = kept.below(span)[0]
    assert began(running_span) < began(queue) < ended(running_span)
    assert span.parent is not None
    assert span.parent.is_remote
    assert [f"{span.parent.trace_id:x}", f"{span.parent.span_id:x}"] == ["a" * 32, "b" * 16]
    assert [f"{link.context.trace_id:x}" for link in span.links] == ["c" * 32]
    for answer in (paused, resumed):
        assert answer.headers["traceresponse"].startswith(named(span))
    assert attribute(span, names.REQUEST_ID) == paused.headers["x-request-id"]
    moves = [
        [attribute(event, name) for name in (names.KV_FROM, names.KV_TO, names.KV_BYTES)]
        for event in events(span, names.KV_MOVE)
    ]
    assert [move[:2] for move in moves] == [["host", "to_device"], ["to_device", "device"]]
    assert moves[1][2] == usage["bytes_in"] > 0
    (restore,) = kept.below(queue)
    assert ended(restore) - began(restore) == pytest.approx(1e6 * usage["resume_ms"]["restore"], rel=0.01)
    (pause,) = [each for each in kept.below(span) if each.name == "pause"]
    assert [attribute(pause, name) for name in (names.PAUSE_LAYER, names.PAUSE_BREAKPOINT)] == [1, armed["id"]]
    assert attribute(events(span, names.RESUME)[0], names.RESUME_BY) == "request"
    assert attribute(span, names.CONVERSATION) == session.rpartition("/")[2]
    assert attribute(span, names.FINISH_REASONS) == ("length",)
    assert attribute(span, names.OUTPUT_TOKENS) == 4
    assert attribute(running_span, names.FINISH_REASONS) == ("cancelled",)


def test_a_timeout_resumes_a_turn_and_its_fork_and_a_close_ends_another(kept: Spans) -> None:
    with serve(otlp_endpoint=COLLECTOR) as url, httpx.Client(base_url=url, timeout=60) as http:
        session = open_session(http)
        arm(http, session, once=True, timeout_s=0.5)
        assert generate(http, session)["status"] == "paused"
        child = http.post(f"{session}/fork", headers={"traceparent": CALLER}).raise_for_status()
        for each in (session, f"/v1/sessions/{child.json()['id']}"):
            wait_until_idle(http, each)
        closing = open_session(http)
        arm(http, closing)
        assert generate(http, closing)["status"] == "paused"
        http.delete(closing).raise_for_status()
    assert child.headers["traceresponse"].startswith("00-" + "a" * 32)
    first, second, closed = kept.turns
    assert first.context is not None
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    for span in (first, second):
        assert attribute(events(span, names.RESUME)[0], names.RESUME_BY) == "timeout"
        assert attribute(span, names.FINISH_REASONS) == ("length",)
    assert attribute(closed, names.FINISH_REASONS) == ("cancelled",)
    assert_nested(kept)


def test_turns_of_other_routes_have_spans_without_a_word_of_the_user(kept: Spans, roomy_model: Path) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_completion_tokens": 4, "n": 2}
    event = {"type": "response.create", "model": "tiny", "input": SECRET, "max_output_tokens": 4}
    caller = {"traceparent": CALLER}
    with serve(model=str(roomy_model), otlp_endpoint=COLLECTOR) as url, httpx.Client(base_url=url, timeout=60) as http:
        answer = http.post("/v1/chat/completions", json=asked, headers=caller).raise_for_status()
        with connect(f"{url.replace('http', 'ws', 1)}/v1/responses", additional_headers=caller) as websocket:
            websocket.send(json.dumps(event))
            while json.loads(websocket.recv(timeout=60))["type"] not in ("response.completed", "response.incomplete"):
                pass
        opened: dict[str, Any] = {"metadata": {SECRET: SECRET}}
        session = f"/v1/sessions/{http.post('/v1/sessions', json=opened).json()['id']}"
        own = {"max_tokens": 4, "stop": [SECRET], "temperature": 0}
        http.post(f"{session}/generate", json={"prompt": SECRET, **own}).raise_for_status()
        http.post(f"{session}/generate", json={"prompt": SECRET, "no_field": SECRET})
        headers = {"X-Session-ID": SECRET}
        http.post("/v1/completions", json={"model": "tiny", "prompt": SECRET, **own}, headers=headers)
    first, second, response, *others = kept.turns
    assert [span.name for span in (first, second)] == ["chat tiny"] * 2
    assert len(others) == 2
    for span in (first, second, response):
        assert span.parent is not None
        assert f"{span.parent.span_id:x}" == "b" * 16
    assert answer.headers["traceresponse"].startswith(named(first))
    for span in kept:
        assert SECRET not in span.to_json()


def test_an_answer_names_no_span_where_none_is_sampled(kept: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with serve(otlp_endpoint=COLLECTOR) as url, httpx.Client(base_url=url, timeout=60) as http:
        session = open_session(http)
        arm(http, session, once=True)
        assert generate(http, session)["status"] == "paused"
        assert resume(http, session)["status"] == "finished"
        answer = http.post(f"{session}/generate", json=GREEDY)
    assert "traceresponse" not in answer.headers
    assert not list(kept)
