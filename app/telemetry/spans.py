"""The span of one turn, which opens in the queue and ends with the turn. What it says are numbers, names and ids. Spans
go to a collector over OTLP and HTTP, in batches, from a thread of their own.

`gen_ai.*` and `error.type` are from OpenTelemetry's semantic conventions 1.41.1. Since 1.42.0 those for GenAI have a
repository of their own, open-telemetry/semantic-conventions-genai, without a release yet. None of them is stable.
`gen_ai.server.time_to_first_token` is the name of a metric there; here it is an attribute, in seconds from submit. A
turn that paused before its first token has none. An error is told by its `code`: its message may have a part of what a
client wrote.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import get_global_textmap
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from app.domain.activations import CheckpointInfo
from app.domain.errors import DjinnError
from app.domain.memory_map import SessionMemory
from app.domain.values import Tier
from app.logs import REQUEST, request_id
from app.messages import Failed, Paused, Started, Token, TurnEvent, TurnFinished
from app.settings.groups import TRACES_PATH
from app.telemetry.turn_metrics import CLOSE_S, TRACE_RESPONSE, TurnStart

logger = logging.getLogger(__name__)

CHAT_FIELDS = ("messages", "input")
"""What a conversation comes in. Any other field has a text to go on with."""

Attributes = dict[str, AttributeValue]


def operation_of(turn: TurnStart) -> str:
    """The kind of the turn, in a word of the conventions."""
    return "chat" if turn.param in CHAT_FIELDS else "text_completion"


def at_begin(turn: TurnStart) -> Attributes:
    """What is known before the turn runs: samplers may look at it."""
    known: Attributes = {
        "gen_ai.operation.name": operation_of(turn),
        "gen_ai.provider.name": "djinn",
        "gen_ai.request.model": turn.model,
        "gen_ai.conversation.id": turn.session,
        "gen_ai.request.max_tokens": turn.max_tokens,
        "djinn.kv.tier": tier_of(turn.kv),
        **by_request(),
    }
    if turn.owner is not None:
        known["djinn.tenant"] = turn.owner
    if (sampling := turn.sampling) is not None:
        names = ("seed", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
        known |= {f"gen_ai.request.{name}": getattr(sampling, name) for name in names}
    return known


def tier_of(kv: SessionMemory) -> str:
    """Where KV is, or is moving."""
    return "none" if kv.tier is None else kv.tier.value


def by_request() -> Attributes:
    """The id of the task's request, if there is one."""
    found = request_id()
    return {} if found is None else {"djinn.request.id": found}


_PROPAGATOR: TextMapPropagator = (
    get_global_textmap() if os.environ.get("OTEL_PROPAGATORS") else TraceContextTextMapPropagator()
)
"""By itself OpenTelemetry reads `baggage` too, and its warnings would have a caller's words."""


def caller() -> Context:
    """What the headers of the task's request say of its caller; empty if they say nothing, or there is no request.

    `OTEL_PROPAGATORS` says which headers; without it, they are `traceparent` and `tracestate`.
    """
    scope = REQUEST.get()
    carrier: dict[str, str] = {}
    for raw, value in () if scope is None else scope["headers"]:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        carrier[name] = f"{carrier[name]},{text}" if name in carrier else text  # two parents are none
    return _PROPAGATOR.extract(carrier, Context())


def tell_caller(span: SpanContext) -> None:
    """Have the answer to the task's request name the span. Of several turns it names the first."""
    scope = REQUEST.get()
    if scope is not None:
        named = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
        scope["state"].setdefault(TRACE_RESPONSE, named)


MOST_PARTS = 128
"""Spans below a turn's own. A turn that pauses at each token would have three for each, and no end of them."""


class TurnSpan:
    """Follows one turn. Nothing here raises or waits. Times are those of `time.perf_counter`, until they are written
    into a span.
    """

    @classmethod
    def begin(cls, tracer: Tracer, turn: TurnStart) -> Self | None:
        """The turn that the task's request has asked for; None if it is not sampled."""
        begun = cls(tracer, turn)
        if not begun.span.is_recording():
            return None
        tell_caller(begun.span.get_span_context())
        return begun

    def __init__(self, tracer: Tracer, turn: TurnStart) -> None:
        """Begin in the queue; a copy begins with a pause. The parent is what the task's request comes from."""
        self._tracer = tracer
        self._zero_ns = time.time_ns() - time.perf_counter_ns()
        self._begun = time.perf_counter()
        self.span: Span = tracer.start_span(
            f"{operation_of(turn)} {turn.model}",
            caller(),
            SpanKind.SERVER,
            at_begin(turn),
            [Link(turn.copy_of.span.get_span_context())] if isinstance(turn.copy_of, TurnSpan) else (),
            self._ns(self._begun),
        )
        self._below = set_span_in_context(self.span, Context())
        self._kv = turn.kv
        self._part: Span | None = None
        self._parts = 0
        self._since = self._begun
        """When the part began."""
        self._pauses = 0
        self._has_token = False
        self._restored_ms = 0.0
        """Of the turn's earlier parts: the engine tells the sum."""
        self._returns_since: float | None = None
        """When the KV set out for the device, since the turn is in the queue."""
        self._enter("pause" if turn.is_copy else "queue", self._begun)

    def observe(self, event: TurnEvent) -> None:
        """Take the turn's next event."""
        match event:
            case Token():
                if not self._has_token:
                    self._take_first_token(time.perf_counter())
            case Started():
                self._start(event)
            case Paused():
                self._pause(event.checkpoint)
            case TurnFinished():
                self._finish(event)
            case Failed():
                self._fail(event.error)

    def placed(self, memory: SessionMemory) -> None:
        """Note a move of the session's KV, or that it is lost. KV that only grows has not moved."""
        before, self._kv = self._kv, memory
        if before.tier in (None, memory.tier):
            return
        now = time.perf_counter()
        is_read = memory.tier is Tier.TO_HOST and before.tier is Tier.DISK
        if self._returns_since is None and (is_read or memory.tier is Tier.TO_DEVICE):
            self._returns_since = now
        moved = memory.bytes_in - before.bytes_in + memory.bytes_out - before.bytes_out
        self.span.add_event(
            "djinn.kv.move",
            {"djinn.kv.from": tier_of(before), "djinn.kv.to": tier_of(memory), "djinn.kv.bytes": moved},
            self._ns(now),
        )

    def resumed(self) -> None:
        """Wait in the queue again. Link the task's request, which has resumed the turn; without one, a timeout has."""
        now = time.perf_counter()
        request = get_current_span(caller()).get_span_context()
        if request.is_valid:
            self.span.add_link(request)
        by = "timeout" if REQUEST.get() is None else "request"
        self.span.add_event("djinn.resume", {"djinn.resume.by": by, **by_request()}, self._ns(now))
        tell_caller(self.span.get_span_context())
        self._returns_since = None
        self._enter("queue", now)

    def _start(self, event: Started) -> None:
        at = max(event.at, self._since)
        restored_s, self._restored_ms = (event.restore_ms - self._restored_ms) / 1000, event.restore_ms
        if restored_s > 0 and self._part is not None and self._parts < MOST_PARTS:
            self._parts += 1
            # The word that the KV has set out may have come after it was there.
            began = max(self._since, min(self._returns_since or self._since, at - restored_s))
            below = set_span_in_context(self._part, Context())
            restore = self._tracer.start_span("restore", below, start_time=self._ns(began))
            restore.end(self._ns(min(began + restored_s, at)))
        self._returns_since = None
        self._enter("decode" if self._has_token else "prefill", at)

    def _take_first_token(self, now: float) -> None:
        self._has_token = True
        if not self._pauses:
            self.span.set_attribute("gen_ai.server.time_to_first_token", now - self._begun)
        self.span.add_event("djinn.first_token", timestamp=self._ns(now))
        self._enter("decode", now)

    def _pause(self, checkpoint: CheckpointInfo) -> None:
        self._pauses += 1
        where: Attributes = {
            "djinn.pause.layer": checkpoint.layer,
            "djinn.pause.first_position": checkpoint.first,
            "djinn.pause.end_position": checkpoint.end,
            "djinn.pause.pass": checkpoint.in_pass.value,
        }
        if checkpoint.breakpoint is not None:
            where["djinn.pause.breakpoint"] = checkpoint.breakpoint
        self._enter("pause", time.perf_counter(), where)

    def _finish(self, event: TurnFinished) -> None:
        usage = event.usage
        self.span.set_attributes(
            {
                "gen_ai.response.finish_reasons": (event.reason.value,),
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "djinn.usage.recomputed_tokens": usage.tokens_recomputed,
                "djinn.turn.pauses": self._pauses,
            }
        )
        self._end()

    def _fail(self, error: DjinnError) -> None:
        self.span.set_attributes({"error.type": error.code, "djinn.turn.pauses": self._pauses})
        self.span.set_status(StatusCode.ERROR, error.code)
        self._end()

    def _end(self) -> None:
        now = time.perf_counter()
        self._leave(now)
        self.span.end(self._ns(now))

    def _enter(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        self._leave(at)
        self._since = at
        if self._parts < MOST_PARTS:
            self._parts += 1
            self._part = self._tracer.start_span(name, self._below, attributes=attributes, start_time=self._ns(at))

    def _leave(self, at: float) -> None:
        if self._part is not None:
            self._part.end(self._ns(at))
            self._part = None

    def _ns(self, at: float) -> int:
        """The same time in Unix nanoseconds."""
        return self._zero_ns + int(at * 1e9)


SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
BETWEEN_LINES_S = 60.0
SPEAKS_FOR_ITSELF = {
    "opentelemetry.exporter": logging.CRITICAL,
    "opentelemetry.sdk": logging.ERROR,
    "opentelemetry.baggage": logging.ERROR,
}
"""The packages' own loggers, and the level from which on they are heard. Below it they have a line for each attempt,
for spans that find no room in the queue, and with what a caller's header says."""


class QuietExporter(SpanExporter):
    """Sends spans through another exporter. Called on the thread of the batch processor only."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._lost = 0
        """Spans since the collector took any."""
        self._has_told = False
        """Whether the log knows of them."""
        self._silent_until = 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send them, once: those that the collector does not take are gone."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._has_told:
                logger.info("the collector takes spans again; lost meanwhile: %d", self._lost)
            self._lost, self._has_told = 0, False
            return result
        self._lost += len(spans)
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until, self._has_told = now + BETWEEN_LINES_S, True
            logger.warning("the collector of traces takes no spans; lost so far: %d", self._lost)
        return result

    def shutdown(self) -> None:
        """Give up what is being tried, and send nothing more."""
        self._exporter.shutdown()


def exporter_to(endpoint: str | None) -> SpanExporter:
    """What sends spans to the collector at the URL `endpoint`; None: where `OTEL_EXPORTER_OTLP_*` say."""
    return OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}{TRACES_PATH}")


class SpanTraces:
    """Traces turns as spans. `OTEL_*` say what is sampled, how long the queue and the batches are, and more."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = QuietExporter(exporter)
        own = version("djinn-server")
        resource = Resource.create({SERVICE_NAME: "djinn", SERVICE_VERSION: own})
        # Not the global provider: what else uses that would send what requests said.
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("djinn", own, schema_url=SCHEMA_URL)
        for name, level in SPEAKS_FOR_ITSELF.items():
            logging.getLogger(name).setLevel(level)

    def begin(self, turn: TurnStart) -> TurnSpan | None:
        """Begin the span of a turn that the task's request has asked for; None if it is not sampled."""
        return TurnSpan.begin(self._tracer, turn)

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="djinn-traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()
