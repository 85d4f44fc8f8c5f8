"""What the experiment does, decided before it runs."""

from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least


@dataclass(frozen=True, slots=True)
class MigratePlan:
    """How much is measured.

    For each of `lengths`, `repeats` sessions of so many tokens move. Then `new_tokens` of text are added and `decoded`
    tokens are generated, greedily.

    Raises `LoadgenError` if a value is outside its range.
    """

    lengths: tuple[int, ...] = (256, 512, 1024, 1536)
    repeats: int = 3
    new_tokens: int = 16
    decoded: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.lengths, default=0) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise LoadgenError("lengths must be different numbers from 1")
        require_at_least(1, self, "repeats", "new_tokens", "decoded")
        require_at_least(0, self, "seed")

    @property
    def longest(self) -> int:
        """Tokens of the longest history at its end; the answer to the prompt is one token."""
        return max(self.lengths) + 1 + self.new_tokens + self.decoded
