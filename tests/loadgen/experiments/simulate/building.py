"""Small clusters and loads."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.experiments.simulate.costs import Costs, Points, Samples
from loadgen.load.trace import AgentPlan, TurnPlan

DECODE: Points = ((1, 0.02), (8, 0.04))
ONE_EACH: Samples = ((1, (1.0,)),)
PROMPT: Points = ((1, 0.02), (512, 0.5))


def costs(
    decode_s: Points = DECODE, prompt_s: Points = PROMPT, first_byte_s: float = 0.0, decoded: Samples = ONE_EACH
) -> Costs:
    """A server whose KV moves at 1 GB/s, 10 kB of each token."""
    return Costs(
        decode_s=decode_s,
        decoded=decoded,
        prompt_s=prompt_s,
        first_byte_s=first_byte_s,
        opening_s=0.0,
        bytes_per_token=10_000,
        out_bytes_per_s=1e9,
        in_bytes_per_s=1e9,
        to_disk_bytes_per_s=1e9,
        from_disk_bytes_per_s=1e9,
    )


def agent(arrival_s: float, thinks: Sequence[float] = (), new: int = 100, completion: int = 10) -> AgentPlan:
    """An agent with a turn more than it thinks, which it announces."""
    turns = [TurnPlan(new, completion, think_s, think_s, False) for think_s in thinks]
    return AgentPlan(arrival_s, (*turns, TurnPlan(new, completion, None, None, False)))
