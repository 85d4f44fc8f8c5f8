"""Findings made by hand."""

from __future__ import annotations

from client import MemoryMap
from loadgen.experiments.whitebox.findings import Arm, Findings, Rates, RoundTrip, Saved, Steered, Trial, Waited, Window
from loadgen.targets.histogram import Bucket


def memory(owned: int = 0, checkpoint: int = 0, sessions: int = 0) -> MemoryMap:
    """A server's map with so many bytes held."""
    tier = {"total_bytes": 1 << 20, "owned_bytes": 0, "cached_bytes": 0}
    return MemoryMap.model_validate(
        {
            "text": {"total_bytes": 0, "kept_bytes": 0, "ring_bytes": 0, "streamed_bytes": 0},
            "data": {
                "device": {**tier, "owned_bytes": owned},
                "host": tier,
                "disk": tier,
                "block_bytes": 1,
                "block_tokens": 1,
            },
            "stack": {"checkpoints": int(checkpoint > 0), "checkpoint_bytes": checkpoint, "capture_bytes": 0},
            "policy": "signal",
            "moves": {},
            "counts": {
                "write_behind_bytes": 0,
                "turned_round": 0,
                "dropped": 0,
                "disk_failures": 0,
                "late_restores": 0,
            },
            "sessions": sessions,
            "sessions_by_tier": {},
            "turns_running": 0,
            "turns_waiting": 0,
            "tenants": None,
        }
    )


def histogram(*counts: int) -> list[Bucket]:
    """So many observations up to 0.1, 1 and 10 ms, and beyond."""
    uppers = (1e-4, 1e-3, 1e-2, float("inf"))
    return [Bucket(upper, sum(counts[: place + 1])) for place, upper in enumerate(uppers)]


def everything() -> Findings:
    """A run in which every target is met."""
    return Findings(
        trials=[Trial(layer, 0, (1, 2, 3), (1, 2, 3), 1, 2) for layer in (3, 6)],
        round_trips=[
            RoundTrip(Waited.RESUME, 64, 0.2),
            RoundTrip(Waited.RESUME, 1, 0.03),
            RoundTrip(Waited.TOKEN, 1, 0.02),
            RoundTrip(Waited.READ, 64, 0.004),
            RoundTrip(Waited.WRITE, 64, 0.005),
        ],
        saved=[Saved(64, 1 << 16, 2e-5), Saved(1, 1 << 10, 1e-5)],
        steered=[Steered(3, 0, 1), Steered(3, 1, None), Steered(6, 0, 0)],
        rates=[Rates({Arm.PLAIN: 100.0, Arm.UNMATCHED: 99.5, Arm.STEERED: 80.0})],
        windows=[
            Window(0, False, (100, 100), 100.0),
            Window(0, True, (99, 100), 99.5),
        ],
        memory={"before": memory(), "during": memory(4096, 256, 1), "after": memory()},
        histograms={
            "djinn_checkpoint_save_seconds": histogram(2, 0, 0, 0),
            "djinn_checkpoint_restore_seconds": histogram(0, 2, 0, 0),
            "djinn_resume_dispatch_seconds": histogram(2, 0, 0, 0),
        },
    )
