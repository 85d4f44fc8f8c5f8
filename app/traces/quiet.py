"""A collector that is away: the log says so, once a minute at most."""

import logging
import time
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

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
            self._succeed()
        else:
            self._fail(len(spans))
        return result

    def shutdown(self) -> None:
        """Give up what is being tried, and send nothing more."""
        self._exporter.shutdown()

    def _succeed(self) -> None:
        if self._has_told:
            logger.info("the collector takes spans again; lost meanwhile: %d", self._lost)
        self._lost, self._has_told = 0, False

    def _fail(self, spans: int) -> None:
        self._lost += spans
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until, self._has_told = now + BETWEEN_LINES_S, True
            logger.warning("the collector of traces takes no spans; lost so far: %d", self._lost)
