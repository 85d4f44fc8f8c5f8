"""Prometheus metrics of the engine's memory. The engine counts; here its map is only put into their form."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from app.domain.memory_map import DraftCounts, MemoryMap, MoveTotals, StepCounts, TextUse
from app.domain.values import Tier

MOVE_FIGURES: dict[str, tuple[str, Callable[[MoveTotals], float]]] = {
    "djinn_kv_moves": ("Moves of KV", lambda totals: totals.moves),
    "djinn_kv_moved_bytes": ("Bytes of KV moved", lambda totals: totals.bytes),
    "djinn_kv_move_seconds": ("Seconds that copies of KV took", lambda totals: totals.seconds),
}


def engine_metrics(memory: MemoryMap | None, *, is_up: bool) -> Iterator[Metric]:
    """Every metric that follows from the map; None: there is none now. `is_up`: there is an engine."""
    yield GaugeMetricFamily("djinn_engine_up", "0 while there is no engine, or it does not get on", float(is_up))
    if memory is not None:
        yield from _memory_metrics(memory)


def _memory_metrics(memory: MemoryMap) -> Iterator[Metric]:
    yield GaugeMetricFamily("djinn_sessions", "Open sessions", memory.sessions)
    yield GaugeMetricFamily("djinn_turns_running", "Turns that the engine works on", memory.running)
    yield GaugeMetricFamily("djinn_turns_waiting", "Turns in the queue", memory.waiting)
    used = memory.kv_owned_bytes / memory.kv_total_bytes
    yield GaugeMetricFamily("djinn_kv_usage_ratio", "Share of the device's KV pool that sessions hold", used)
    yield _bytes(memory)
    yield from _text(memory.text)
    stack = memory.stack
    yield GaugeMetricFamily("djinn_turns_paused", "Turns that stand at a breakpoint", stack.checkpoints)
    yield GaugeMetricFamily("djinn_checkpoint_bytes", "Residual streams of paused turns", stack.checkpoint_bytes)
    yield GaugeMetricFamily("djinn_capture_bytes", "Captured residual streams", stack.capture_bytes)
    by_tier = GaugeMetricFamily("djinn_sessions_by_tier", "Sessions that have KV", labels=["tier"])
    for tier in Tier:
        by_tier.add_metric([tier], memory.sessions_by_tier.get(tier, 0))
    yield by_tier
    yield from _steps(memory.steps)
    yield from _drafts(memory.drafts)
    yield from _moves(memory)
    yield from _counts(memory)


def _bytes(memory: MemoryMap) -> Metric:
    found = GaugeMetricFamily("djinn_kv_bytes", "Bytes for KV", labels=["tier", "kind"])
    device = (memory.kv_total_bytes, memory.kv_owned_bytes, memory.kv_cached_bytes)
    lower = ((use.total_bytes, use.owned_bytes, use.cached_bytes) for use in (memory.host, memory.disk))
    for tier, figures in zip((Tier.DEVICE, Tier.HOST, Tier.DISK), (device, *lower), strict=True):
        for kind, figure in zip(("total", "owned", "cached"), figures, strict=True):
            found.add_metric([tier, kind], figure)
    return found


def _text(text: TextUse) -> Iterator[Metric]:
    found = GaugeMetricFamily("djinn_text_bytes", "Bytes of weights, and what the device has for them", labels=["kind"])
    for kind, figure in (("total", text.total_bytes), ("kept", text.kept_bytes), ("ring", text.ring_bytes)):
        found.add_metric([kind], figure)
    yield found
    streamed = "Bytes of weights that were brought to the device, step after step"
    yield CounterMetricFamily("djinn_text_streamed_bytes", streamed, text.streamed_bytes)


def _steps(steps: StepCounts) -> Iterator[Metric]:
    found = CounterMetricFamily("djinn_steps", "Steps that the device was given", labels=["kind"])
    found.add_metric(["replayed"], steps.replayed)
    found.add_metric(["runs"], steps.in_runs)
    found.add_metric(["eager"], steps.eager)
    yield found
    followed = "Steps that the device was given while it ran the one before"
    yield CounterMetricFamily("djinn_steps_followed", followed, steps.followed)
    computed = "Tokens that steps computed, also for turns that were cancelled"
    yield CounterMetricFamily("djinn_step_tokens", computed, steps.tokens)


def _drafts(drafts: DraftCounts) -> Iterator[Metric]:
    yield CounterMetricFamily("djinn_draft_tokens", "Tokens that were computed before they were chosen", drafts.drafted)
    accepted = "Drafted tokens that were chosen"
    yield CounterMetricFamily("djinn_draft_tokens_accepted", accepted, drafts.accepted)


def _moves(memory: MemoryMap) -> Iterator[Metric]:
    for name, (text, figure) in MOVE_FIGURES.items():
        found = CounterMetricFamily(name, text, labels=["direction"])
        for direction, totals in memory.moves.items():
            found.add_metric([direction], figure(totals))
        yield found


def _counts(memory: MemoryMap) -> Iterator[Metric]:
    counts = memory.counts
    for name, text, count in (
        ("djinn_kv_write_behind_bytes", "Bytes of KV copied to the host ahead of need", counts.write_behind_bytes),
        ("djinn_kv_turned_round", "Moves that a new signal overtook", counts.turned_round),
        ("djinn_kv_dropped", "Sessions whose KV was dropped for want of room in a lower tier", counts.dropped),
        ("djinn_kv_disk_failures", "KV files that could not be written or read", counts.disk_failures),
        ("djinn_kv_late_restores", "Turns that found their KV not yet on the device", counts.late_restores),
    ):
        yield CounterMetricFamily(name, text, count)
