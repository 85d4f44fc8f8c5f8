"""Records for tests, as a run would have made them."""

from __future__ import annotations

from typing import Any

from client import MemoryMap
from loadgen.load.records import Moves, Run, Sample, ServerTotals, TurnCost, TurnRecord

COST = TurnCost(prompt_tokens=100, completion_tokens=4, cached_tokens=60, recomputed_tokens=0)


def record(
    agent: int = 0, turn: int = 0, sent_s: float = 0.0, latency_s: float = 1.0, cost: TurnCost = COST
) -> TurnRecord:
    """A turn that was due 0.25 s before it was sent, with events after 0.5, 0.75 and 0.875 of its latency."""
    times = tuple(latency_s * part for part in (0.5, 0.75, 0.875))
    return TurnRecord(agent, turn, sent_s - 0.25, sent_s, times, latency_s, cost)


def sample(at_s: float = 0.0, **told: Any) -> Sample:
    """A sample in which everything that is not given is unknown."""
    nothing = dict.fromkeys(("running", "waiting", "kv_used", "cpu_s", "rss_bytes"))
    return Sample(at_s, **{"sessions": {}, "bytes": {}, **nothing, **told})


def moved(count: int, moved_bytes: int, seconds: float, dropped: int = 0) -> Run:
    """A run in which KV left the device."""
    totals = ServerTotals({"out": Moves(count, moved_bytes, seconds)}, {"dropped": dropped})
    return Run(1.0, totals=totals)


def memory(owned: int = 0, checkpoint: int = 0, sessions: int = 0) -> MemoryMap:
    """A server's map with so many bytes held."""
    tier = {"total_bytes": 1 << 20, "owned_bytes": 0, "cached_bytes": 0}
    counts = ("write_behind_bytes", "turned_round", "dropped", "disk_failures", "late_restores")
    return MemoryMap.model_validate(
        {
            "text": dict.fromkeys(("total_bytes", "kept_bytes", "ring_bytes", "streamed_bytes"), 0),
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
            "counts": dict.fromkeys(counts, 0),
            "tenants": None,
            "sessions": sessions,
            "sessions_by_tier": {},
            "turns_running": 0,
            "turns_waiting": 0,
        }
    )
