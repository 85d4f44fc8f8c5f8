"""Every Prometheus metric of one server, and the text of `/metrics`."""

from collections.abc import Iterator, Mapping
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric

from app.domain.homes import MoveReason
from app.domain.journal_state import JournalState
from app.domain.memory_map import MemoryMap
from app.metrics.connections import ConnectionMetrics
from app.metrics.journal import journal_metrics
from app.metrics.memory import engine_metrics
from app.metrics.prompts import PromptMetrics
from app.metrics.tenants import TenantUse, tenant_metrics
from app.metrics.turns import TurnMetrics, seconds
from app.metrics.vllm import WithVllmNames

SIGNAL_BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.01)


class Metrics:
    """What the server counts by itself, in a registry of its own, and what it asks for at each scrape."""

    def __init__(self, model_name: str) -> None:
        own = CollectorRegistry()
        self.turns = TurnMetrics(own)
        self.signal = seconds("djinn_signal_seconds", "From a parsed phase signal to its answer", SIGNAL_BUCKETS, own)
        self.ignored_fields = Counter(
            "djinn_ignored_fields", "Fields without effect that answers named", ["field"], registry=own
        )
        self.engine_restarts = Counter("djinn_engine_restarts", "Engines that took a dead one's place", registry=own)
        self.moved = Counter(
            "djinn_sessions_moved", "Sessions that have gone to another server, by why", ["reason"], registry=own
        )
        for reason in MoveReason:
            self.moved.labels(reason.value)
        self.event_streams = Gauge("djinn_event_streams", "Open streams of /v1/events", registry=own)
        self.connections = ConnectionMetrics(own)
        self.prompts = PromptMetrics(own)
        self._own = own
        self._labels = {"model_name": model_name, "engine": "0"}

    def render(
        self, memory: MemoryMap | None, journal: JournalState, tenants: Mapping[str, TenantUse], *, is_up: bool
    ) -> bytes:
        """The text of `/metrics`, with the engine's part taken from `memory`, the journal's from `journal`, and that of
        each tenant from `tenants`. None: the engine has not told. `is_up`: there is one.
        """

        def metrics() -> Iterator[Metric]:
            return chain(
                engine_metrics(memory, is_up=is_up),
                journal_metrics(journal),
                tenant_metrics(tenants),
                self._own.collect(),
            )

        return generate_latest(WithVllmNames(metrics, self._labels))
