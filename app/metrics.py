"""Prometheus metrics: `djinn_*`, and the common serving metrics under vLLM's names so that existing dashboards work."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.messages import Failed, MemoryMap, Started, Token, TurnEvent, TurnFinished

TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
TURN_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)

VLLM_NAMES = {
    "djinn_turns_running": "vllm:num_requests_running",
    "djinn_turns_waiting": "vllm:num_requests_waiting",
    "djinn_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "djinn_prompt_tokens": "vllm:prompt_tokens",
    "djinn_generation_tokens": "vllm:generation_tokens",
    "djinn_prefix_cache_queries": "vllm:prefix_cache_queries",
    "djinn_prefix_cache_hits": "vllm:prefix_cache_hits",
    "djinn_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "djinn_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "djinn_turn_queue_seconds": "vllm:request_queue_time_seconds",
    "djinn_turn_seconds": "vllm:e2e_request_latency_seconds",
    "djinn_turns_finished": "vllm:request_success",
}


class Metrics:
    """Every metric of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        own = CollectorRegistry()
        self.sessions = Gauge("djinn_sessions", "Open sessions", registry=own)
        self.turns_running = Gauge("djinn_turns_running", "Turns that the engine works on", registry=own)
        self.turns_waiting = Gauge("djinn_turns_waiting", "Turns in the queue", registry=own)
        self.kv_usage_ratio = Gauge("djinn_kv_usage_ratio", "Share of the KV pool that sessions hold", registry=own)
        self.kv_bytes = Gauge("djinn_kv_bytes", "Bytes of the KV pool", ["kind"], registry=own)
        self.prompt_tokens = Counter("djinn_prompt_tokens", "Context tokens that turns started from", registry=own)
        self.generation_tokens = Counter("djinn_generation_tokens", "Tokens generated", registry=own)
        self.cache_queries = Counter("djinn_prefix_cache_queries", "Tokens looked up in the KV", registry=own)
        self.cache_hits = Counter("djinn_prefix_cache_hits", "Tokens whose KV was there already", registry=own)
        self.first_token = Histogram(
            "djinn_time_to_first_token_seconds",
            "From submit to first token",
            buckets=TURN_BUCKETS,
            registry=own,
        )
        self.inter_token = Histogram(
            "djinn_inter_token_latency_seconds",
            "Between two tokens of a turn",
            buckets=TOKEN_BUCKETS,
            registry=own,
        )
        self.queue = Histogram("djinn_turn_queue_seconds", "From submit to start", buckets=TURN_BUCKETS, registry=own)
        self.turn = Histogram("djinn_turn_seconds", "From submit to end", buckets=TURN_BUCKETS, registry=own)
        self.finished = Counter("djinn_turns_finished", "Turns that ended", ["finished_reason"], registry=own)
        self.failed = Counter("djinn_turns_failed", "Turns that failed", ["code"], registry=own)
        self._exported = CollectorRegistry()
        self._exported.register(_WithVllmNames(own, {"model_name": model_name, "engine": "0"}))

    def render(self, memory: MemoryMap) -> bytes:
        """The text of `/metrics`, the gauges set from `memory`."""
        self.sessions.set(memory.sessions)
        self.turns_running.set(memory.running)
        self.turns_waiting.set(memory.waiting)
        self.kv_usage_ratio.set(memory.kv_owned_bytes / memory.kv_total_bytes)
        self.kv_bytes.labels("total").set(memory.kv_total_bytes)
        self.kv_bytes.labels("owned").set(memory.kv_owned_bytes)
        self.kv_bytes.labels("cached").set(memory.kv_cached_bytes)
        return generate_latest(self._exported)


class TurnClock:
    """Times one turn, from the moment it is made, and records it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._submitted = time.perf_counter()
        self._started = self._submitted
        self._last_token: float | None = None
        self.queue_ms = 0.0
        self.prefill_ms = 0.0

    def observe(self, event: TurnEvent) -> None:
        """Take the turn's next event."""
        now = time.perf_counter()
        match event:
            case Started():
                # Its own time: it is delivered together with the first tokens.
                self._started = event.at
                self.queue_ms = (event.at - self._submitted) * 1000
                self._metrics.queue.observe(event.at - self._submitted)
            case Token():
                self._observe_token(now)
            case TurnFinished():
                self._observe_end(event, now)
            case Failed():
                self._metrics.failed.labels(event.error.code).inc()

    def _observe_token(self, now: float) -> None:
        if self._last_token is None:
            self.prefill_ms = (now - self._started) * 1000
            self._metrics.first_token.observe(now - self._submitted)
        else:
            self._metrics.inter_token.observe(now - self._last_token)
        self._last_token = now

    def _observe_end(self, event: TurnFinished, now: float) -> None:
        usage = event.usage
        self._metrics.turn.observe(now - self._submitted)
        self._metrics.finished.labels(event.reason.value).inc()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.generation_tokens.inc(usage.completion_tokens)
        self._metrics.cache_queries.inc(usage.prompt_tokens)
        self._metrics.cache_hits.inc(usage.cached_tokens)


class _WithVllmNames(Collector):
    """A registry's metrics, each of `VLLM_NAMES` a second time under its other name and with vLLM's labels."""

    def __init__(self, source: CollectorRegistry, labels: dict[str, str]) -> None:
        self._source = source
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        for metric in self._source.collect():
            yield metric
            if metric.name in VLLM_NAMES:
                yield self._renamed(metric, VLLM_NAMES[metric.name])

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            renamed.add_sample(name + suffix, {**sample.labels, **self._labels}, sample.value)
        return renamed
