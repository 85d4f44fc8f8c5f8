"""What the experiment does, decided before it runs."""

from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.kv.links import NOMINAL_LINKS, Link

MIN_TOKENS = 32
"""Less is not a whole block on every server, and too little to time."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How much is measured.

    Sessions of `tokens` tokens of real text are copied, sent and compressed `repeats` times each. `decoded` tokens show
    what fp8 does to the answer.

    Raises `LoadgenError` if a value is outside its range.
    """

    tokens: int = 1024
    repeats: int = 5
    decoded: int = 64
    links: tuple[Link, ...] = NOMINAL_LINKS
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(MIN_TOKENS, self, "tokens")
        require_at_least(1, self, "repeats", "decoded")
        require_at_least(0, self, "seed")
        names = [link.name for link in self.links]
        if len(set(names)) < len(names):
            raise LoadgenError(f"every link needs its own name: {', '.join(names)}")
