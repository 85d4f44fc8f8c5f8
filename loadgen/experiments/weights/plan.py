"""What the experiment does, decided before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.weights.findings import Way
from loadgen.results.text import MIB

SPARE_TOKENS = 32
"""Of each session: blocks have 16 tokens."""
LEAST_PROMPT = 2
FEWEST_TOKENS = 2
"""The first is no decode step."""

READING = (Way.STREAMED, Way.DOUBLE_BUFFER, Way.ACCELERATE, Way.PLAIN)
"""Whose weights come from files."""


@dataclass(frozen=True, slots=True)
class Cell:
    """So many sessions at once; `cold`: with nothing of the weights' files in the page cache."""

    batch: int
    cold: bool = False

    def __str__(self) -> str:
        sessions = "1 session" if self.batch == 1 else f"{self.batch} sessions"
        return f"{sessions}, cold" if self.cold else sessions


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """How much is measured: each of `batches`, which share out `prompt` tokens of text and generate `tokens` tokens a
    session, `repeats` times in every way. The smallest also `cold`. `chunks` are the sizes of a sweep, in bytes.

    Raises `LoadgenError` if a value is outside its range.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 1024
    tokens: int = 32
    repeats: int = 5
    cold: bool = False
    chunks: tuple[int, ...] = tuple(size * MIB for size in (16, 32, 64, 128, 256, 512))
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batches", "chunks"):
            values = getattr(self, name)
            if min(values, default=0) < 1 or len(set(values)) < len(values):
                raise LoadgenError(f"{name} must be different numbers from 1")
        if self.prompt < (least := LEAST_PROMPT * max(self.batches)):
            raise LoadgenError(f"prompt must be at least {least}: {LEAST_PROMPT} tokens for each session of a batch")
        require_at_least(FEWEST_TOKENS, self, "tokens")
        require_at_least(1, self, "repeats")
        require_at_least(0, self, "seed")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All of them, in the order in which they are measured."""
        cold = (Cell(min(self.batches), cold=True),) if self.cold else ()
        return (*(Cell(batch) for batch in self.batches), *cold)

    def prompt_tokens(self, batch: int) -> int:
        """Of each session of a batch: all batches have as much text to compute before their first tokens."""
        return self.prompt // batch

    @property
    def kv_tokens(self) -> int:
        """Room for the largest batch at its end, each session with a block that is partly filled, and one to spare."""
        return max((self.prompt_tokens(batch) + self.tokens + SPARE_TOKENS) * (batch + 1) for batch in self.batches)


QUICK = WeightsPlan(batches=(1, 8), prompt=128, tokens=8, repeats=2)
"""About a minute for a small model on two cores."""


def ways_of(cell: Cell, ways: Sequence[Way]) -> tuple[Way, ...]:
    """Those of `ways` that take part in it: where a disk is waited for, those that read from one."""
    return tuple(way for way in ways if not cell.cold or way in READING)


def order_of_ways(ways: Sequence[Way], repeat: int, cell: int) -> tuple[Way, ...]:
    """The ways for one cell: each is first as often as the others, so that what drifts falls on all alike."""
    first = (repeat + cell) % len(ways)
    return (*ways[first:], *ways[:first])
