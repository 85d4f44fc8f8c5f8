"""The common serving metrics of servers that are not Djinn, from their `/metrics`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from client import APIError
from client.calls import Call
from client.transport import AsyncTransport
from loadgen.load.records import ServerTotals
from loadgen.sampling.reading import Reading

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USED = ("vllm:kv_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")
"""The names of one figure in vLLM, SGLang and llama.cpp. In all three the use of KV is a share, whatever its name."""
COUNTS = {"preemptions": ("vllm:num_preemptions_total",)}

NO_METRICS = (404, 405, 501)
"""What a server answers that has none, such as llama.cpp without `--metrics`; any other error may pass."""

WANTED = frozenset((*RUNNING, *WAITING, *KV_USED, *(name for names in COUNTS.values() for name in names)))


class PrometheusReader:
    """Reads `/metrics`, until it turns out that the server has none."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._absent = False

    async def read(self) -> Reading | None:
        if self._absent:
            return None
        try:
            return await self._transport.send(Call("GET", "/metrics", lambda body: read_metrics(body.decode())))
        except APIError as error:
            if error.status not in NO_METRICS:
                raise
            self._absent = True
            return None

    async def close(self) -> None:
        await self._transport.close()


def read_metrics(text: str) -> Reading:
    """A reading from the text of `/metrics`. Raises `ValueError` if it is not in the format of Prometheus."""
    samples = _wanted_samples(text)
    running, waiting = _first(samples, RUNNING), _first(samples, WAITING)
    used = _first(samples, KV_USED)
    return Reading(
        running=None if running is None else round(sum(running)),
        waiting=None if waiting is None else round(sum(waiting)),
        kv_used=None if used is None else max(used),
        totals=ServerTotals(
            counts={
                label: round(sum(found))
                for label, names in COUNTS.items()
                if (found := _first(samples, names)) is not None
            }
        ),
    )


def _wanted_samples(text: str) -> Mapping[str, list[float]]:
    """The values of the wanted metrics, one for each set of labels: a server has one for each of its engines.

    Only their lines are parsed: to parse a page of histograms takes tens of milliseconds, in which no event of the
    load would be read.
    """
    lines = (line for line in text.splitlines() if line.split("{", 1)[0].split(" ", 1)[0] in WANTED)
    samples = defaultdict(list)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            samples[sample.name].append(float(sample.value))
    return samples


def _first(samples: Mapping[str, list[float]], names: Iterable[str]) -> list[float] | None:
    """The values of the first of the names that is there."""
    return next((samples[name] for name in names if name in samples), None)
