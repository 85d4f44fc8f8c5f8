"""Prometheus metrics of the journal."""

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from app.domain.journal_state import JournalState


def journal_metrics(state: JournalState) -> Iterator[Metric]:
    """Every metric that follows from the journal's state."""
    failing = "1 while the journal cannot be written"
    yield GaugeMetricFamily("djinn_journal_failing", failing, float(state.failure is not None))
    waiting = "Sessions, vectors and responses with changes that are not in the journal yet"
    yield GaugeMetricFamily("djinn_journal_waiting", waiting, state.waiting)
    if state.epoch is not None:
        yield GaugeMetricFamily("djinn_lease_epoch", "Number of the state folder's lease", state.epoch)
        held = "1 while the lease of the state folder is held, 0 while the server is fenced"
        yield GaugeMetricFamily("djinn_lease_held", held, float(not state.is_fenced))
