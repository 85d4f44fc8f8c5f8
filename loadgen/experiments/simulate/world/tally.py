"""What is counted while a cluster is simulated."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from loadgen.experiments.simulate.world.session import Turn
from loadgen.experiments.simulate.world.tiers import Traffic


@dataclass(slots=True)
class Tally:
    """Figures of all turns, as arrays in the order in which the turns ended, and counts.

    `refused` counts tries of turns whose replica was away, `interrupted` turns that had to begin anew. `finds` and
    `puts` are the directory's look-ups and writes, by the second. `named_finds` and `named_puts` would be added to them
    if every client named its sessions itself. `away` counts turns of sessions that were on the move.
    """

    sent_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    number: array[int] = field(default_factory=lambda: array("l"))
    traffic: Traffic = field(default_factory=Traffic)
    sessions: int = 0
    turns: int = 0
    recomputed_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    refused: int = 0
    interrupted: int = 0
    redirects: int = 0
    moves: int = 0
    moved_tokens: int = 0
    away: int = 0
    finds: Counter[int] = field(default_factory=Counter)
    puts: Counter[int] = field(default_factory=Counter)
    named_finds: Counter[int] = field(default_factory=Counter)
    named_puts: Counter[int] = field(default_factory=Counter)

    def ended(self, turn: Turn, now: float) -> None:
        """A turn is over, for ever."""
        self.turns += 1
        self.sent_s.append(turn.sent_s)
        self.ttft_s.append(turn.first_s - turn.sent_s)
        self.tpot_s.append((now - turn.first_s) / (turn.completion - 1) if turn.completion > 1 else -1.0)
        self.number.append(turn.number)
        self.recomputed_tokens += turn.recomputed
        self.generated_tokens += turn.completion

    def ttfts(self, *, resumed: bool) -> Iterator[float]:
        """Seconds to the first token, of resumed turns or of first ones."""
        return (ttft for ttft, number in zip(self.ttft_s, self.number, strict=True) if (number > 0) is resumed)

    def tpots(self) -> Iterator[float]:
        """Seconds per token after the first, of turns that have more."""
        return (tpot for tpot in self.tpot_s if tpot >= 0)
