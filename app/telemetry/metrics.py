"""Every Prometheus metric of one server, and the text of `/metrics`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.domain.homes import MoveReason
from app.domain.memory_map import MemoryMap
from app.domain.values import JournalState, Tier
from app.telemetry.turn_metrics import TurnMetrics, labelled


class Refused(StrEnum):
    """Why a connection was not taken."""

    ADDRESS = "address"
    """Its address has as many as it may."""
    TOTAL = "total"
    """All addresses together have as many as they may."""
    SYSTEM = "system"
    """The operating system could not give it to the server, for lack of descriptors or memory."""


class Ended(StrEnum):
    """Why the server ended a connection that it had taken."""

    HEADER = "header"
    """The rest of a header did not come."""
    BODY = "body"
    """The rest of a body did not come."""
    UNREAD = "unread"
    """The client did not read its answer."""
    GAVE_WAY = "gave_way"
    """It had no request under way, and another needed the room."""


class ConnectionMetrics:
    """Connections of one server, in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge("djinn_connections", "Open connections of clients", registry=registry)
        self.refused = labelled(
            "djinn_connections_refused", "Connections that were not taken", "cause", Refused, registry
        )
        self.ended = labelled("djinn_connections_ended", "Connections that the server ended", "cause", Ended, registry)


def journal_metrics(state: JournalState) -> Iterator[Metric]:
    """Every metric that follows from the journal's state."""
    failing = "1 while the journal cannot be written"
    yield GaugeMetricFamily("djinn_journal_failing", failing, float(state.failure is not None))
    waiting = "Sessions, uploads and responses with changes that are not in the journal yet"
    yield GaugeMetricFamily("djinn_journal_waiting", waiting, state.waiting)
    if state.epoch is not None:
        yield GaugeMetricFamily("djinn_lease_epoch", "Number of the state folder's lease", state.epoch)
        held = "1 while the lease of the state folder is held, 0 while the server is fenced"
        yield GaugeMetricFamily("djinn_lease_held", held, float(not state.is_fenced))


def tenant_metrics(uses: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """Every metric that follows from what tenants have, by their names. The empty name is that of callers without a
    key. Of each: `sessions`, `turns_running`, `turns_waiting`, and KV as `device_bytes`, `host_bytes`, `disk_bytes`.
    """
    sessions = GaugeMetricFamily("djinn_tenant_sessions", "Open sessions of a tenant", labels=["tenant"])
    turns = GaugeMetricFamily("djinn_tenant_turns", "Turns of a tenant", labels=["tenant", "state"])
    kv = GaugeMetricFamily("djinn_tenant_kv_bytes", "KV of a tenant's sessions", labels=["tenant", "tier"])
    for tenant, use in uses.items():
        sessions.add_metric([tenant], use["sessions"])
        for state in ("running", "waiting"):
            turns.add_metric([tenant, state], use[f"turns_{state}"])
        for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK):
            kv.add_metric([tenant, tier], use[f"{tier}_bytes"])
    yield from (sessions, turns, kv)


class PromptMetrics:
    """What this server has asked for, and what it has computed for others, in the given registry."""

    def __init__(self, own: CollectorRegistry) -> None:
        outcomes = ("whole", "part", "none")
        self._asked = labelled(
            "djinn_prompts_apart", "Prompts that another server was to compute", "came", outcomes, own
        )
        self._asked_tokens = Counter(
            "djinn_prompt_tokens_apart", "Tokens of prompts whose KV another server has sent", registry=own
        )
        self._served = Counter("djinn_prompts_served", "Prompts computed for another server", registry=own)
        self._served_tokens = Counter(
            "djinn_prompt_tokens_served", "Tokens of prompts computed for another server", registry=own
        )

    def asked(self, *, whole: bool, tokens: int) -> None:
        """Count a prompt of which that many tokens have come."""
        self._asked.labels("whole" if whole else "part" if tokens else "none").inc()
        self._asked_tokens.inc(tokens)

    def served(self, tokens: int) -> None:
        """Count a prompt that has been sent."""
        self._served.inc()
        self._served_tokens.inc(tokens)


VLLM_NAMES = {
    "djinn_turns_running": "vllm:num_requests_running",
    "djinn_turns_waiting": "vllm:num_requests_waiting",
    "djinn_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "djinn_prompt_tokens": "vllm:prompt_tokens",
    "djinn_generation_tokens": "vllm:generation_tokens",
    "djinn_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "djinn_draft_tokens_accepted": "vllm:spec_decode_num_accepted_tokens",
    "djinn_prefix_cache_queries": "vllm:prefix_cache_queries",
    "djinn_prefix_cache_hits": "vllm:prefix_cache_hits",
    "djinn_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "djinn_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "djinn_turn_queue_seconds": "vllm:request_queue_time_seconds",
    "djinn_turn_seconds": "vllm:e2e_request_latency_seconds",
    "djinn_turns_finished": "vllm:request_success",
}


class WithVllmNames(Collector):
    """The metrics of `source`, each of `VLLM_NAMES` a second time under its other name and with vLLM's labels."""

    def __init__(self, source: Callable[[], Iterable[Metric]], labels: dict[str, str]) -> None:
        self._source = source
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for metric in self._source():
            yield metric
            if metric.name in VLLM_NAMES:
                renamed = Metric(VLLM_NAMES[metric.name], metric.documentation, metric.type)
                for sample in metric.samples:
                    suffix = sample.name.removeprefix(metric.name)
                    renamed.add_sample(renamed.name + suffix, {**sample.labels, **self._labels}, sample.value)
                yield renamed


MOVE_FIGURES = {
    "djinn_kv_moves": ("Moves of KV", "moves"),
    "djinn_kv_moved_bytes": ("Bytes of KV moved", "bytes"),
    "djinn_kv_move_seconds": ("Seconds that copies of KV took", "seconds"),
}
"""What each tells, and the field of `MoveTotals` that it is."""
T = TypeVar("T", GaugeMetricFamily, CounterMetricFamily)


def engine_metrics(memory: MemoryMap | None, *, is_up: bool) -> Iterator[Metric]:
    """Every metric that follows from the map; None: there is none now. `is_up`: there is an engine."""
    yield GaugeMetricFamily("djinn_engine_up", "0 while there is no engine, or it makes no progress", float(is_up))
    if memory is None:
        return
    used, stack = memory.device.owned_bytes / memory.device.total_bytes, memory.stack
    for name, about, gauge in (
        ("djinn_sessions", "Open sessions", memory.sessions),
        ("djinn_turns_running", "Turns that the engine works on", memory.running),
        ("djinn_turns_waiting", "Turns in the queue", memory.waiting),
        ("djinn_kv_usage_ratio", "Share of the device's KV pool that sessions hold", used),
        ("djinn_turns_paused", "Turns that stand at a breakpoint", stack.checkpoints),
        ("djinn_checkpoint_bytes", "Residual streams of paused turns", stack.checkpoint_bytes),
        ("djinn_capture_bytes", "Captured residual streams", stack.capture_bytes),
    ):
        yield GaugeMetricFamily(name, about, gauge)
    yield _bytes(memory)
    text = {"total": memory.text.total_bytes, "kept": memory.text.kept_bytes, "ring": memory.text.ring_bytes}
    weights = "Bytes of weights, and what the device has for them"
    yield _labelled(GaugeMetricFamily, "djinn_text_bytes", weights, "kind", text)
    by_tier = {tier.value: memory.sessions_by_tier.get(tier, 0) for tier in Tier}
    yield _labelled(GaugeMetricFamily, "djinn_sessions_by_tier", "Sessions that have KV", "tier", by_tier)
    steps = {"replayed": memory.steps.replayed, "runs": memory.steps.in_runs, "eager": memory.steps.eager}
    yield _labelled(CounterMetricFamily, "djinn_steps", "Steps that the device was given", "kind", steps)
    for name, (about, field) in MOVE_FIGURES.items():
        figures = {direction: getattr(totals, field) for direction, totals in memory.moves.items()}
        yield _labelled(CounterMetricFamily, name, about, "direction", figures)
    yield from _counters(memory)


def _bytes(memory: MemoryMap) -> Metric:
    found = GaugeMetricFamily("djinn_kv_bytes", "Bytes for KV", labels=["tier", "kind"])
    for tier, use in ((Tier.DEVICE, memory.device), (Tier.HOST, memory.host), (Tier.DISK, memory.disk)):
        for kind in ("total", "owned", "cached"):
            found.add_metric([tier, kind], getattr(use, f"{kind}_bytes"))
    return found


def _labelled(family: type[T], name: str, text: str, label: str, figures: Mapping[str, float]) -> T:
    found = family(name, text, labels=[label])
    for value, figure in figures.items():
        found.add_metric([value], figure)
    return found


def _counters(memory: MemoryMap) -> Iterator[Metric]:
    steps, drafts, counts = memory.steps, memory.drafts, memory.counts
    for name, text, count in (
        (
            "djinn_text_streamed_bytes",
            "Bytes of weights that were brought to the device, step after step",
            memory.text.streamed_bytes,
        ),
        ("djinn_steps_followed", "Steps that the device was given while it ran the one before", steps.followed),
        ("djinn_step_tokens", "Tokens that steps computed, also for turns that were cancelled", steps.tokens),
        ("djinn_draft_tokens", "Tokens that were computed before they were chosen", drafts.drafted),
        ("djinn_draft_tokens_accepted", "Drafted tokens that were chosen", drafts.accepted),
        ("djinn_kv_write_behind_bytes", "Bytes of KV copied to the host ahead of need", counts.write_behind_bytes),
        ("djinn_kv_turned_round", "Moves that a new signal overtook", counts.turned_round),
        ("djinn_kv_dropped", "Sessions whose KV was dropped for want of room in a lower tier", counts.dropped),
        ("djinn_kv_disk_failures", "KV files that could not be written or read", counts.disk_failures),
        ("djinn_kv_late_restores", "Turns that found their KV not yet on the device", counts.late_restores),
    ):
        yield CounterMetricFamily(name, text, count)


SIGNAL_BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.01)


class Metrics:
    """What the server counts by itself, in its registry, and what it asks for at each scrape."""

    def __init__(self, model_name: str) -> None:
        own = CollectorRegistry()
        self.turns = TurnMetrics(own)
        signal = "From a parsed phase signal to its answer"
        self.signal = Histogram("djinn_signal_seconds", signal, buckets=SIGNAL_BUCKETS, registry=own)
        self.ignored_fields = Counter(
            "djinn_ignored_fields", "Fields without effect that answers named", ["field"], registry=own
        )
        self.engine_restarts = Counter("djinn_engine_restarts", "Engines that took a dead one's place", registry=own)
        self.moved = labelled(
            "djinn_sessions_moved", "Sessions that have gone to another server, by why", "reason", MoveReason, own
        )
        self.batch_requests = labelled(
            "djinn_batch_requests", "Requests of batches that are done", "outcome", ("completed", "failed"), own
        )
        self.files_bytes = Gauge("djinn_files_bytes", "Bytes of kept files, and of those being written", registry=own)
        self.event_streams = Gauge("djinn_event_streams", "Open streams of /v1/events", registry=own)
        self.connections = ConnectionMetrics(own)
        self.prompts = PromptMetrics(own)
        self.cluster_requests = Counter(
            "djinn_cluster_requests", "Requests for what one replica owns", ["turn", "way"], registry=own
        )
        self.cluster_replicas = Gauge(
            "djinn_cluster_replicas", "Replicas of the cluster, as this one sees them", ["state"], registry=own
        )
        self._own = own
        self._labels = {"model_name": model_name, "engine": "0"}

    def totals(self, memory: MemoryMap | None) -> dict[tuple[str, str], float]:
        """Counters since the start, by name and label: the server's own, and those of the engine that `memory` has.
        Findings and estimates compare them with earlier ones.
        """
        turns = self.turns
        counters = (turns.failed, turns.finished, turns.resumed_first_token, turns.inter_token, self.engine_restarts)
        own = chain.from_iterable(each.collect() for each in (*counters, self.connections.refused))
        found = chain(own, () if memory is None else engine_metrics(memory, is_up=True))
        samples = chain.from_iterable(metric.samples for metric in found)
        return {
            (each.name, "".join(each.labels.values())): each.value
            for each in samples
            if each.name.endswith(("_total", "_count", "_sum"))
        }

    def render(
        self, memory: MemoryMap | None, journal: JournalState, tenants: Mapping[str, Mapping[str, int]], *, is_up: bool
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
