"""Spans on their way to a collector: over OTLP and HTTP, in batches, from a thread of their own."""

import threading
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from app.settings.tracing import TRACES_PATH
from app.traces.base import CLOSE_S, TurnStart
from app.traces.names import DJINN, SCHEMA_URL
from app.traces.quiet import QuietExporter, hush
from app.traces.turn_span import TurnSpan


def exporter_to(endpoint: str | None) -> SpanExporter:
    """What sends spans to the collector at the URL `endpoint`; None: where `OTEL_EXPORTER_OTLP_*` say."""
    return OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}{TRACES_PATH}")


class SpanTraces:
    """Traces turns as spans. `OTEL_*` say what is sampled, how long the queue and the batches are, and more."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = QuietExporter(exporter)
        own = version("djinn-server")
        resource = Resource.create({SERVICE_NAME: DJINN, SERVICE_VERSION: own})
        # Not the global provider: what else uses that would send what requests said.
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(DJINN, own, schema_url=SCHEMA_URL)
        hush()

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
