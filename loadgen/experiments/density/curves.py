"""How a run went over time. Pure."""

from collections.abc import Mapping
from itertools import accumulate

from loadgen.load.records import Run, Sample
from loadgen.stats import Summary

TIERS = ("device", "host", "disk")
MOVING = "moving"

PARTS = ("queue", "restore", "prefill")
REST = "the rest"
"""The network, the first token's own pass, and what no server tells."""

Points = list[tuple[float, float]]


def completed(run: Run) -> Points:
    """Turns completed until each moment, in seconds."""
    ends = sorted(turn.sent_s + turn.latency_s for turn in run.turns)
    return [(0.0, 0.0), *((end, float(number)) for number, end in enumerate(ends, 1))]


def in_flight(run: Run) -> Points:
    """Turns sent and not yet over at each moment; those that failed are not known to have begun."""
    changes = sorted(
        [(turn.sent_s, 1) for turn in run.turns] + [(turn.sent_s + turn.latency_s, -1) for turn in run.turns]
    )
    heights = accumulate(change for _, change in changes)
    return [(0.0, 0.0), *((at_s, float(height)) for (at_s, _), height in zip(changes, heights, strict=True))]


def device_bytes(run: Run) -> Points:
    """Bytes of KV on the device over time; empty if the server does not tell."""
    return [(sample.at_s, float(sample.bytes["device"])) for sample in run.samples if "device" in sample.bytes]


def device_budget(run: Run) -> int | None:
    """Bytes of KV for which the device has room, from how much of it was in use; None if that is not known."""
    shares = [(sample.bytes["device"], sample.kv_used) for sample in run.samples if "device" in sample.bytes]
    held, used = max(((held, used) for held, used in shares if used), default=(0, None))
    return None if used is None else round(held / used)


def told_of_tiers(run: Run) -> list[Sample]:
    """The samples that say where sessions are."""
    return [sample for sample in run.samples if sample.sessions]


def by_tier(sessions: Mapping[str, int]) -> dict[str, int]:
    """Sessions in each tier, and those on their way from one to another, which Djinn counts by where they go."""
    resting = {tier: sessions.get(tier, 0) for tier in TIERS}
    return {**resting, MOVING: sum(sessions.values()) - sum(resting.values())}


def mean_parts(summary: Summary) -> dict[str, float] | None:
    """The mean time to first token of resumed turns in its parts, in seconds; None if the server does not tell them."""
    ttft = summary.ttft_resumed_s
    told = [getattr(summary, f"{part}_s") for part in PARTS]
    if ttft is None or None in told:
        return None
    means = [distribution.mean for distribution in told]
    return dict(zip((*PARTS, REST), (*means, max(0.0, ttft.mean - sum(means))), strict=True))
