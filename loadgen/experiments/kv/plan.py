"""What the experiment does, decided before it runs."""

from dataclasses import dataclass

from loadgen.errors import LoadgenError
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
        if self.tokens < MIN_TOKENS:
            raise LoadgenError(f"tokens must be at least {MIN_TOKENS}")
        for name in ("repeats", "decoded"):
            if getattr(self, name) < 1:
                raise LoadgenError(f"{name} must be at least 1")
        if self.seed < 0:
            raise LoadgenError("seed must be at least 0")
        names = [link.name for link in self.links]
        if len(set(names)) < len(names):
            raise LoadgenError(f"every link needs a name of its own: {', '.join(names)}")
