"""The spans of turns: from events of the engine that a test makes up, and of a real server."""

import inspect
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import StatusCode
from websockets.sync.client import connect

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import Pass
from app.domain.errors import EngineRestarting
from app.domain.memory_map import SessionMemory
from app.domain.values import FinishReason, SamplingParams, SessionId, Ticket, Tier, TurnUsage
from app.logs import REQUEST
from app.messages import Failed, Paused, Started, Token, TurnEvent, TurnFinished
from app.telemetry import spans
from app.telemetry.spans import MOST_PARTS, TurnSpan
from app.telemetry.turn_metrics import TurnStart
from tests.routers.breakpoints.pausing import arm, open_session
from tests.routers.generating import CONTEXT, GREEDY, in_tier, streaming, wait_for
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

TICKET = Ticket(1)
SESSION = SessionId("ses_" + "0" * 36)
START = TurnStart(SESSION, "tenant", "tiny", SessionMemory(tier=Tier.HOST), 8, "prompt", SamplingParams(seed=1))
CHECKPOINT = CheckpointInfo(2, 4, 5, 64, "float32", 256, Pass.DECODE, "bp_1", 0.1, 0.0)
USAGE = TurnUsage(prompt_tokens=9, cached_tokens=4, completion_tokens=3, tokens_recomputed=2)
PAUSED = Paused(TICKET, CHECKPOINT, USAGE)
FINISHED = TurnFinished(TICKET, FinishReason.STOP, USAGE, 12)
TOKEN = Token(TICKET, 5)
ENDS = (FINISHED, Failed(TICKET, EngineRestarting("it has died beside 'swordfish'")))


def started(restore_ms: float = 0.0) -> Started:
    return Started(TICKET, 4, restore_ms)


def observe(turn: TurnSpan, *events: TurnEvent) -> None:
    for event in events:
        turn.observe(event)


class Traced:
    """Spans of turns that a test makes up."""

    def __init__(self) -> None:
        exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = provider.get_tracer("test")
        self.spans = Spans(exporter)

    def begin(self, start: TurnStart = START) -> TurnSpan:
        span = TurnSpan.begin(self.tracer, start)
        assert span is not None
        return span


@pytest.fixture
def traced() -> Traced:
    return Traced()


def requested(*headers: tuple[bytes, bytes]) -> dict[str, object]:
    return {"headers": headers, "state": {"request_id": "req_1"}}


def test_the_names_are_those_of_the_conventions() -> None:
    modules = (gen_ai_attributes, gen_ai_metrics, error_attributes)
    published = {name for module in modules for name in vars(module).values() if isinstance(name, str)}
    ours = set(re.findall(r'"((?:gen_ai|error)\.[a-z_.]+)"', inspect.getsource(spans)))
    assert len(ours) > 10
    assert ours <= published
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {"chat", "text_completion"} <= operations


def test_an_error_is_the_spans_status_without_its_message(traced: Traced) -> None:
    turn = traced.begin()
    turn.observe(started())
    turn.observe(ENDS[1])
    span = traced.spans.turn()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == attribute(span, "error.type") == "engine_restarting"
    assert "swordfish" not in span.to_json()


SENSELESS: list[list[tuple[bytes, bytes]]] = [
    [(b"traceparent", b"swordfish")],
    [(b"traceparent", CALLER.encode()), (b"Traceparent", RESUMER.encode())],
    [(b"traceparent", b"00-" + b"0" * 32 + b"-" + b"b" * 16 + b"-01")],
    [(b"tracestate", b"a=1")],
]


def test_a_caller_that_says_no_sense_is_no_parent_and_one_that_samples_nothing_gets_no_span(traced: Traced) -> None:
    for headers in SENSELESS:
        token = REQUEST.set(requested(*headers))
        traced.begin().observe(FINISHED)
        REQUEST.reset(token)
    assert [span.parent for span in traced.spans.turns] == [None] * len(SENSELESS)
    token = REQUEST.set(asked := requested((b"traceparent", CALLER.removesuffix("1").encode() + b"0")))
    assert TurnSpan.begin(traced.tracer, START) is None
    REQUEST.reset(token)
    assert len(traced.spans.turns) == len(SENSELESS)
    assert "traceresponse" not in str(asked["state"])


@pytest.mark.parametrize("restore_ms", [0.0, 0.1])
def test_a_turn_that_pauses_at_each_token_has_an_end_of_spans(traced: Traced, restore_ms: float) -> None:
    turn = traced.begin()
    for number in range(1, MOST_PARTS + 1):
        observe(turn, started(restore_ms=number * restore_ms), TOKEN, PAUSED)
        turn.resumed()
    turn.observe(FINISHED)
    below = [each for each in traced.spans if each.parent is not None]
    assert any(each.name == "restore" for each in below) == bool(restore_ms)
    assert len(below) == MOST_PARTS
    assert attribute(traced.spans.turn(), "djinn.turn.pauses") == MOST_PARTS


STRETCH = st.tuples(st.floats(0, 50), st.integers(0, 3), st.sampled_from([None, *Tier]))


@given(st.lists(STRETCH, max_size=5), st.sampled_from(ENDS), st.booleans())
def test_however_a_turn_goes_all_spans_end_within_their_parents(
    stretches: list[tuple[float, int, Tier | None]], end: TurnFinished | Failed, is_late: bool
) -> None:
    traced = Traced()
    turn = traced.begin()
    restored = 0.0
    for restore_ms, tokens, tier in stretches:
        turn.placed(SessionMemory(tier=tier))
        restored += restore_ms
        turn.observe(structs.replace(started(restored), at=time.perf_counter() + (0 if is_late else -1)))
        observe(turn, *[TOKEN] * tokens, PAUSED)
        turn.resumed()
    turn.observe(end)
    assert_nested(traced.spans)
    assert traced.spans.below(traced.spans.turn())[-1].name == "queue"


SECRET = "swordfish"


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
    assert attribute(span, "djinn.request.id") == paused.headers["x-request-id"]
    moves = [
        [attribute(event, name) for name in ("djinn.kv.from", "djinn.kv.to", "djinn.kv.bytes")]
        for event in events(span, "djinn.kv.move")
    ]
    assert [move[:2] for move in moves] == [["host", "to_device"], ["to_device", "device"]]
    assert moves[1][2] == usage["bytes_in"] > 0
    (restore,) = kept.below(queue)
    assert ended(restore) - began(restore) == pytest.approx(1e6 * usage["resume_ms"]["restore"], rel=0.01)
    (pause,) = [each for each in kept.below(span) if each.name == "pause"]
    assert [attribute(pause, name) for name in ("djinn.pause.layer", "djinn.pause.breakpoint")] == [1, armed["id"]]
    assert attribute(events(span, "djinn.resume")[0], "djinn.resume.by") == "request"
    assert attribute(span, "gen_ai.conversation.id") == session.rpartition("/")[2]
    assert attribute(span, "gen_ai.response.finish_reasons") == ("length",)
    assert attribute(span, "gen_ai.usage.output_tokens") == 4
    assert attribute(span, "gen_ai.usage.cache_read.input_tokens") == usage["last_turn"]["cached_tokens"] > 0
    seconds = attribute(span, "gen_ai.server.time_to_first_token")
    assert isinstance(seconds, float)
    assert 0 < seconds < 60
    assert len(events(span, "djinn.first_token")) == 1
    assert attribute(running_span, "gen_ai.response.finish_reasons") == ("cancelled",)


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
