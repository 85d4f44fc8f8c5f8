"""What the experiment does, decided before it runs."""

import math
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least


@dataclass(frozen=True, slots=True)
class WhiteboxPlan:
    """How much is measured.

    In each of `layers` (empty: a quarter, half and three quarters of the way up), `sequences` prompts of `context`
    tokens are answered with `tokens` tokens. Steering multiplies by `scale`. `others` sessions decode while one is
    paused for `pause_seconds`, `repeats` times with and without it.

    Raises `LoadgenError` if a value is outside its range.
    """

    layers: tuple[int, ...] = ()
    sequences: int = 10
    tokens: int = 64
    context: int = 64
    scale: float = 0.9
    others: int = 16
    pause_seconds: float = 10.0
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(1, self, "sequences", "context", "others", "repeats")
        if self.tokens < 2:
            raise LoadgenError("tokens must be at least 2: one comes from the prompt, the others are decoded")
        require_at_least(0, self, "seed")
        if not 0 < self.pause_seconds < math.inf:
            raise LoadgenError("pause_seconds must be above 0 and finite")
        if not math.isfinite(self.scale):
            raise LoadgenError("scale must be finite")
        if min(self.layers, default=0) < 0 or len(set(self.layers)) < len(self.layers):
            raise LoadgenError("layers must be different numbers from 0")

    def prompts(self, layers: int) -> int:
        """How many prompts the experiment needs with so many layers."""
        return max(layers * self.sequences, self.others)


def choose_layers(num_layers: int) -> tuple[int, ...]:
    """A quarter, half and three quarters of the way up; fewer in a model with fewer than four layers."""
    return tuple(sorted({num_layers * quarters // 4 for quarters in (1, 2, 3)}))
