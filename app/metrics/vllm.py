"""The common serving metrics under vLLM's names, so that existing dashboards work."""

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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
                yield self._renamed(metric, VLLM_NAMES[metric.name])

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            renamed.add_sample(name + suffix, {**sample.labels, **self._labels}, sample.value)
        return renamed
