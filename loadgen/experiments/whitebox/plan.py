"""What the experiment does, and what is seen of a server."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from client import MemoryMap
from loadgen.errors import LoadgenError, require_at_least
from loadgen.experiments.base import Bench, Found
from loadgen.load.prompts import TokenIds
from loadgen.plans import option
from loadgen.targets.histogram import Bucket
from loadgen.targets.subject import Subject


@dataclass(frozen=True, slots=True)
class WhiteboxPlan:
    """How much is measured.

    In each of `layers` (empty: a quarter, half and three quarters of the way up), `sequences` prompts of `context`
    tokens are answered with `tokens` tokens. Steering multiplies by `scale`. `others` sessions decode while one is
    paused for `pause_seconds`, `repeats` times with and without it.

    Raises `LoadgenError` if a value is outside its range.
    """

    layers: tuple[int, ...] = option(
        (), "where to pause and to steer (default: a quarter, half and three quarters of the way up)"
    )
    sequences: int = option(10, "prompts for each layer")
    tokens: int = option(64, "tokens generated for each prompt")
    context: int = option(64, "tokens of each prompt")
    scale: float = option(0.9, "what steering multiplies by")
    others: int = option(16, "sessions that decode next to a paused one")
    pause_seconds: float = option(10.0, "how long they are watched")
    repeats: int = option(3, "how often, with and without the paused session")
    seed: int = option(0, "of texts")

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


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt answered with a pause after `layer` in every pass, and again without: `paused` and `plain`.

    `prefill_pauses` and `decode_pauses` count the passes that paused.
    """

    layer: int
    sequence: int
    plain: TokenIds
    paused: TokenIds
    prefill_pauses: int
    decode_pauses: int

    @property
    def matching(self) -> int:
        """How many tokens are the same."""
        return sum(one == other for one, other in zip(self.plain, self.paused, strict=False))

    @property
    def paused_everywhere(self) -> bool:
        """Whether the prompt paused, and every token but the first, which comes from the prompt."""
        return self.prefill_pauses > 0 and self.decode_pauses == len(self.paused) - 1


class Waited(StrEnum):
    """What was waited for."""

    RESUME = "resume to the next pause"
    """With all layers once, and so one token, in between."""
    TOKEN = "a token without pauses"
    READ = "read the activation"
    WRITE = "write it back"
    SAVED = "engine: put a checkpoint aside"
    """As the server tells it of each pause."""


@dataclass(frozen=True, slots=True)
class Wait:
    """`positions` is how many the checkpoint had, 1 where there was none."""

    waited: Waited
    positions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Steered:
    """A prompt answered under steering; `differs_at` is the first token that is another, None if all are the same."""

    layer: int
    sequence: int
    differs_at: int | None


class Arm(StrEnum):
    """What a session decodes with."""

    PLAIN = "without breakpoints"
    UNMATCHED = "breakpoint that never matches"
    STEERED = "steered"


@dataclass(frozen=True, slots=True)
class Window:
    """What all the others decoded together: `tokens` in each second, and their rate.

    `paused`: whether a session was paused meanwhile, and `undisturbed` whether it then said what it says otherwise.
    """

    repeat: int
    paused: bool
    tokens: tuple[int, ...]
    tokens_per_s: float
    undisturbed: bool = True


@dataclass(slots=True)
class Seen:
    """Everything seen of one target, in order of time. `memory` is the server's map `before`, `during` a pause and
    `after`, `histograms` are the server's own, of this run. `rates` are decoded tokens per second by arm.
    """

    trials: list[Trial] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    steered: list[Steered] = field(default_factory=list)
    rates: list[dict[Arm, float]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    memory: dict[str, MemoryMap] = field(default_factory=dict)
    histograms: dict[str, list[Bucket]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """A server that has answered, with all that its parts need."""

    bench: Bench[WhiteboxPlan]
    layers: tuple[int, ...]
    prompts: tuple[TokenIds, ...]
    found: Found
    seen: Seen = field(default_factory=Seen)

    @property
    def subject(self) -> Subject:
        """The server."""
        return self.bench.subject

    @property
    def plan(self) -> WhiteboxPlan:
        """How much is measured."""
        return self.bench.plan

    @property
    def middle_layer(self) -> int:
        """The one layer of the parts that measure speed."""
        return self.layers[len(self.layers) // 2]
