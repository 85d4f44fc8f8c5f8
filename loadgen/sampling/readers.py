"""What a server tells of itself at one moment: Djinn its memory map, others the common metrics of `/metrics`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from client import APIError, MemoryMap
from client.calls import Call, memory
from client.transport import AsyncTransport
from loadgen.load.records import Moves, ServerTotals


@dataclass(frozen=True, slots=True)
class Reading:
    """Gauges and totals of a server; their meaning is that of `Sample` and `ServerTotals`."""

    sessions: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    totals: ServerTotals = field(default_factory=ServerTotals)


class Reader(Protocol):
    """Asks one kind of server."""

    async def read(self) -> Reading | None:
        """What the server tells now; None if it tells nothing. Raises `client.DjinnError`."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class DjinnReader:
    """Reads `/v1/memory`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def read(self) -> Reading:
        return to_reading(await self._transport.send(memory()))

    async def close(self) -> None:
        await self._transport.close()


def to_reading(found: MemoryMap) -> Reading:
    """A memory map as a reading. Bytes are those that sessions own: what is only kept for reuse gives way to them."""
    data = found.data
    return Reading(
        sessions={str(tier): count for tier, count in found.sessions_by_tier.items()},
        bytes={tier: getattr(data, tier).owned_bytes for tier in ("device", "host", "disk")},
        running=found.turns_running,
        waiting=found.turns_waiting,
        kv_used=data.device.owned_bytes / data.device.total_bytes,
        totals=ServerTotals(
            {way: Moves(moves.count, moves.bytes, moves.seconds) for way, moves in found.moves.items()},
            {} if found.counts is None else found.counts.model_dump(),
        ),
    )


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
