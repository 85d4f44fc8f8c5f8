"""What was seen of each turn, and of the server meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def taken(record: object, *names: str) -> dict[str, Any]:
    """The fields of these names, under them."""
    return {name: getattr(record, name) for name in names}


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
    token_ids: tuple[int, ...] = ()
    """What was generated, of a Djinn server alone."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A completed turn, the first of an agent being number 0.

    `due_s` and `sent_s` are seconds since the start of the run; `token_times_s` (when each event with tokens arrived)
    and `latency_s` (when the turn was over) are seconds since `sent_s`. `tool`: the completion was a call of a tool.
    """

    agent: int
    turn: int
    due_s: float
    sent_s: float
    token_times_s: tuple[float, ...]
    latency_s: float
    cost: TurnCost
    tool: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to the first event with tokens."""
        return self.token_times_s[0]

    @property
    def over_s(self) -> float:
        """When it was over, in seconds since the start of the run."""
        return self.sent_s + self.latency_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, as vLLM's benchmark has it; None for a turn of one token."""
        tokens = self.cost.completion_tokens
        return None if tokens == 1 else (self.token_times_s[-1] - self.ttft_s) / (tokens - 1)


@dataclass(frozen=True, slots=True)
class SignalRecord:
    """A phase that an agent told its server. `sent_s` is in seconds since the start of the run."""

    agent: int
    phase: str
    sent_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A turn that did not complete, or with `turn` None something else that did not get through: a signal, the end of
    a conversation, or, with `agent` None, what comes before the run.

    `kind` is the name of the error's class; `at_s` is in seconds since the start of the run.
    """

    agent: int | None
    turn: int | None
    at_s: float
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The server at one moment, `at_s` seconds after the start of the run. None and empty where it does not tell.

    `sessions` and `bytes` are per tier (`device`, `host`, `disk`): sessions that have KV there, or are on their way
    (`to_host` and the like), and the bytes of KV they hold.
    `running` and `waiting` count turns, `kv_used` is the share of the device's KV room that is taken. `cpu_s` is what
    the server's processes have used since they began, `rss_bytes` what they have in memory.
    """

    at_s: float
    sessions: Mapping[str, int]
    bytes: Mapping[str, int]
    running: int | None
    waiting: int | None
    kv_used: float | None
    cpu_s: float | None
    rss_bytes: int | None


@dataclass(frozen=True, slots=True)
class Moves:
    """What has moved one way: how often, how much, and the seconds that the copies themselves took."""

    count: int
    bytes: int
    seconds: float

    def since(self, before: Moves) -> Moves:
        """What came after an earlier reading."""
        return Moves(self.count - before.count, self.bytes - before.bytes, self.seconds - before.seconds)


@dataclass(frozen=True, slots=True)
class ServerTotals:
    """What a server counts itself: KV moved by direction, and events by name. Empty where it does not count."""

    moves: Mapping[str, Moves] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def since(self, before: ServerTotals) -> ServerTotals | None:
        """What came after an earlier reading; None if a total has fallen, because the server was started anew."""
        nothing = Moves(0, 0, 0.0)
        moves = {way: moved.since(before.moves.get(way, nothing)) for way, moved in self.moves.items()}
        counts = {name: count - before.counts.get(name, 0) for name, count in self.counts.items()}
        if any(moved.count < 0 for moved in moves.values()) or any(count < 0 for count in counts.values()):
            return None
        return ServerTotals(moves, counts)


@dataclass(slots=True)
class Run:
    """Everything seen of one target, in order of time. It grows as the run goes on.

    `totals` is what the server counted during the run; None if it could not be asked at the start and at the end.
    """

    duration_s: float = 0.0
    interrupted: bool = False
    turns: list[TurnRecord] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    signals: list[SignalRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    totals: ServerTotals | None = None
