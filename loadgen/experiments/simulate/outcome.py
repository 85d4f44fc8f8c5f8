"""What a simulation comes to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from loadgen.experiments.simulate.plan import Policy
from loadgen.experiments.simulate.world.simulation import Simulated
from loadgen.stats import Distribution

MOMENTS = 60
"""Parts of the time of a run."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Resumed turns that were sent in one part of the time, whose middle is `at_s`; seconds to their first token."""

    at_s: float
    turns: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Load:
    """How often something is asked: in all, and in its busiest second."""

    total: int
    peak_per_s: int

    @classmethod
    def of(cls, seconds: Counter[int]) -> Load:
        """Of counts by the second."""
        return cls(seconds.total(), max(seconds.values(), default=0))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run of a cluster.

    `rate` is of agents that arrive, per second and replica. `recomputed_tokens` are of histories, `computed_tokens` of
    all prompts, these included. `refused` turns found their replica away when first sent, `away` turns their session on
    the move, and `interrupted` turns began anew. `finds` and `puts` are the directory's, `named_finds` and `named_puts`
    what comes to them where clients name all sessions themselves. `duration_s` is simulated, `took_s` of a CPU.
    """

    replicas: int
    policy: Policy
    rate: float
    sessions: int
    turns: int
    ttft_first_s: Distribution | None
    ttft_resumed_s: Distribution | None
    tpot_s: Distribution | None
    recomputed_tokens: int
    computed_tokens: int
    generated_tokens: int
    refused: int
    interrupted: int
    away: int
    redirects: int
    moves: int
    moved_tokens: int
    dropped: int
    kv_tokens: dict[str, int]
    finds: Load
    puts: Load
    named_finds: Load
    named_puts: Load
    duration_s: float
    took_s: float
    moments: tuple[Moment, ...]

    @property
    def name(self) -> str:
        """What tells it from others of the same size."""
        return self.policy.value


def outcome(done: Simulated, replicas: int, policy: Policy, rate: float) -> Outcome:
    """What the simulation comes to."""
    tally = done.tally
    return Outcome(
        replicas=replicas,
        policy=policy,
        rate=rate,
        sessions=tally.sessions,
        turns=tally.turns,
        ttft_first_s=Distribution.of(tally.ttfts(resumed=False)),
        ttft_resumed_s=Distribution.of(tally.ttfts(resumed=True)),
        tpot_s=Distribution.of(tally.tpots()),
        recomputed_tokens=tally.recomputed_tokens,
        computed_tokens=tally.computed_tokens,
        generated_tokens=tally.generated_tokens,
        refused=tally.refused,
        interrupted=tally.interrupted,
        away=tally.away,
        redirects=tally.redirects,
        moves=tally.moves,
        moved_tokens=tally.moved_tokens,
        dropped=tally.traffic.dropped,
        kv_tokens=tally.traffic.tokens,
        finds=Load.of(tally.finds),
        puts=Load.of(tally.puts),
        named_finds=Load.of(tally.named_finds),
        named_puts=Load.of(tally.named_puts),
        duration_s=done.duration_s,
        took_s=done.took_s,
        moments=_moments(done),
    )


def _moments(done: Simulated) -> tuple[Moment, ...]:
    tally = done.tally
    resumed = np.frombuffer(tally.number, np.int64) > 0
    sent_s, ttft_s = np.frombuffer(tally.sent_s)[resumed], np.frombuffer(tally.ttft_s)[resumed]
    part_s = done.duration_s / MOMENTS
    parts = np.minimum((sent_s / part_s).astype(int), MOMENTS - 1) if part_s else np.zeros(0, int)
    found = []
    for part in range(MOMENTS):
        values = ttft_s[parts == part]
        if values.size:
            p50, p99 = np.percentile(values, (50, 99)).tolist()
            found.append(Moment((part + 0.5) * part_s, int(values.size), p50, p99))
    return tuple(found)
