"""The raw record of a run: what one target did in one round."""

from dataclasses import dataclass

from benchmarks.peers.timeline import DecodePhase


@dataclass(frozen=True, slots=True)
class Measurement:
    """One target's answer to one round's workload.

    ttft_s: seconds to the first token of each long prompt.
    client_cpu_share, other_cpu_share: shares, 0 to 1, of the benchmark's cores that the load client used, and that
    processes outside the benchmark used.
    """

    decode: list[DecodePhase]
    ttft_s: list[float]
    client_cpu_share: float
    other_cpu_share: float


@dataclass(frozen=True, slots=True)
class Round:
    """`start_s`: seconds until the server could answer; None for one that is no server."""

    number: int
    peer: str
    dtype: str
    start_s: float | None
    measurement: Measurement
