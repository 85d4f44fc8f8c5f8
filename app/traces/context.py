"""W3C trace context: the span that a request comes from, and the span that its answer names."""

import os

from opentelemetry.context import Context
from opentelemetry.propagate import get_global_textmap
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.logs.about import REQUEST
from app.traces.base import TRACE_RESPONSE

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
