"""Spans on their way to a collector: over OTLP and HTTP, in batches, from a thread of their own."""

import logging
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from app.settings.values import TRACES_PATH
from app.telemetry.spans import TurnSpan
from app.telemetry.turn_metrics import CLOSE_S, TurnStart

logger = logging.getLogger(__name__)

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
BETWEEN_LINES_S = 60.0
SPEAKS_FOR_ITSELF = {
    "opentelemetry.exporter": logging.CRITICAL,
    "opentelemetry.sdk": logging.ERROR,
    "opentelemetry.baggage": logging.ERROR,
}
"""The packages' own loggers, and the level from which on they are heard. Below it they have a line for each attempt,
for spans that find no room in the queue, and with what a caller's header says."""


def hush() -> None:
    """Keep the packages' own lines about each failure out of the log."""
    for name, level in SPEAKS_FOR_ITSELF.items():
        logging.getLogger(name).setLevel(level)


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
