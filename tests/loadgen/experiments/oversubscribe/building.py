"""Findings made by hand."""

from __future__ import annotations

from loadgen.experiments.oversubscribe.findings import Budget, Check, Findings, GrownTurn, MemorySample

BUDGET = Budget(
    device_bytes=1 << 20, host_bytes=8 << 20, disk_bytes=0, block_bytes=1 << 16, block_tokens=16, policy="signal"
)


def seen(at_s: float, demand: float, device: float, host: float = 0.0) -> MemorySample:
    """A look at a server, in MiB."""
    return MemorySample(at_s, int(demand * 2**20), int(device * 2**20), int(host * 2**20), 0, 1, 0)


def turn(session: int, number: int, *, recomputed: int = 0) -> GrownTurn:
    """A turn of two tokens that took half a second."""
    return GrownTurn(session, number, number + 0.1 * session, 0.5, 20 * (number + 1), 20 * number, recomputed, (1, 2))


def everything() -> Findings:
    """Two sessions of two turns, three times as much as the device holds: every target is met."""
    return Findings(
        budget=BUDGET,
        duration_s=2.0,
        samples=[seen(0.0, 0.0, 0.0), seen(0.5, 0.5, 0.5), seen(1.0, 2.0, 0.9, 1.2), seen(1.5, 3.0, 1.0, 2.9)],
        turns=[turn(session, number) for number in range(2) for session in range(2)],
        checks=[Check(0, (1, 2, 1, 2), (1, 2, 1, 2))],
    )
