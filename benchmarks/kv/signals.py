"""What a phase signal costs: the HTTP round trip, and of that the server's own time."""

import time
from dataclasses import dataclass

import httpx

from benchmarks.kv.turns import extend
from benchmarks.text import TokenSource
from client import Djinn
from client.models import Phase
from loadgen.targets.histogram import Bucket, between, read_buckets

SERVER_HISTOGRAM = "djinn_signal_seconds"
PAUSE_S = 0.01
PHASES: tuple[Phase, Phase] = ("io_wait", "ready")


@dataclass(frozen=True, slots=True)
class SignalTimes:
    """server: the server's time from parsed request to acknowledged command, in s; None if it does not tell."""

    round_trips_s: list[float]
    server: list[Bucket] | None


def measure_signals(client: Djinn, base_url: str, source: TokenSource, *, signals: int, tokens: int) -> SignalTimes:
    """Tell a server that does nothing else, again and again, that a session of `tokens` tokens waits and is back."""
    with client.sessions.create() as session:
        extend(session, source.take(tokens))
        before = _server_buckets(base_url)
        round_trips = []
        for index in range(signals):
            time.sleep(PAUSE_S)
            begin = time.perf_counter()
            session.set_phase(PHASES[index % 2])
            round_trips.append(time.perf_counter() - begin)
        after = _server_buckets(base_url)
    return SignalTimes(round_trips, between(before, after) if before and after else None)


def _server_buckets(base_url: str) -> list[Bucket] | None:
    return read_buckets(httpx.get(f"{base_url}/metrics").raise_for_status().text, SERVER_HISTOGRAM)
