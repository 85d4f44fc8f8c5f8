"""What was seen of each turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


class TurnClock:
    """Notes when the parts of a turn's answer arrive, in seconds since it was made, which is when the turn was sent."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.token_times_s: list[float] = []
        self.over_s = 0.0

    def tokens(self) -> None:
        """An event with tokens is there."""
        self.token_times_s.append(time.perf_counter() - self._started)

    def over(self) -> None:
        """The turn is over."""
        self.over_s = time.perf_counter() - self._started


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What a server says a turn cost, in tokens; None where it does not say.

    `resume_ms` is what went by before the first token: in the queue, while KV came back (`restore`), and in `prefill`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    recomputed_tokens: int | None
    resume_ms: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A completed turn, the first of an agent being number 0.

    `due_s` and `sent_s` are seconds since the start of the run; `token_times_s` (when each event with tokens arrived)
    and `latency_s` (when the turn was over) are seconds since `sent_s`.
    """

    agent: int
    turn: int
    due_s: float
    sent_s: float
    token_times_s: tuple[float, ...]
    latency_s: float
    cost: TurnCost


@dataclass(frozen=True, slots=True)
class SignalRecord:
    """A phase that an agent told its server. `sent_s` is in seconds since the start of the run."""

    agent: int
    phase: str
    sent_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A turn that did not complete, or with `turn` None a signal or the end of a conversation that did not get through.

    `kind` is the name of the error's class; `at_s` is in seconds since the start of the run.
    """

    agent: int
    turn: int | None
    at_s: float
    kind: str
    message: str


@dataclass(slots=True)
class Run:
    """Everything seen of one target, in order of time. It grows as the run goes on."""

    duration_s: float = 0.0
    interrupted: bool = False
    turns: list[TurnRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    signals: list[SignalRecord] = field(default_factory=list)
