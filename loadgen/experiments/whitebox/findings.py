"""What was seen of one target, as it was seen."""

from dataclasses import dataclass, field
from enum import StrEnum

from client import MemoryMap
from loadgen.load.prompts import TokenIds
from loadgen.results.failures import Failure
from loadgen.targets.histogram import Bucket


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
    """What a client waited for."""

    RESUME = "resume to the next pause"
    """With all layers once, and so one token, in between."""
    TOKEN = "a token without pauses"
    READ = "read the activation"
    WRITE = "write it back"


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """From sending to the answer. `positions` is how many the checkpoint had, 0 where there was none."""

    waited: Waited
    positions: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """What the server says of a pause: positions, bytes, and how long the engine took to put them aside."""

    positions: int
    bytes: int
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
class Rates:
    """Decoded tokens per second of each arm, one after the other."""

    tokens_per_s: dict[Arm, float]

    def ratio(self, arm: Arm) -> float:
        """What is left of the rate without breakpoints."""
        return self.tokens_per_s[arm] / self.tokens_per_s[Arm.PLAIN]


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
class Findings:
    """Everything seen of one target, in order of time. It grows as the run goes on.

    `memory` is the server's map `before`, `during` a pause and `after`. `histograms` are the server's own, of this run.
    """

    trials: list[Trial] = field(default_factory=list)
    round_trips: list[RoundTrip] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    steered: list[Steered] = field(default_factory=list)
    rates: list[Rates] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    memory: dict[str, MemoryMap] = field(default_factory=dict)
    histograms: dict[str, list[Bucket]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False
