"""How far a run is, from what was planned and what has been seen of it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.experiments.density.curves import by_tier
from loadgen.load.records import Failure, Run, TurnRecord
from loadgen.load.trace import AgentPlan, Trace, planned_turns


@dataclass(frozen=True, slots=True)
class Progress:
    """A run at one moment. Times in seconds.

    `thinking`, `generating` and `done` count the agents that have arrived; an agent generates from when its turn is due
    until it is over. There will be `agents` in all. `tokens` have been generated, or a few more: an event of a turn in
    flight counts as one. `sessions` is per tier, empty if the server does not tell. `left_s` is a guess from how long
    turns have taken so far, None before the first is over.
    """

    elapsed_s: float
    planned: int
    completed: int
    failed: int
    thinking: int
    generating: int
    done: int
    resumed_p50_s: float | None
    resumed_p99_s: float | None
    agents: int
    tokens: int
    tokens_per_s: float
    sessions: Mapping[str, int]
    left_s: float | None


class Follower:
    """Follows one run of `trace`. What has been read of the run is not read again."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._planned = planned_turns(trace)
        self._due_s: list[float | None] = [agent.arrival_s for agent in trace]
        self._next = [0] * len(trace)
        self._read_turns = self._read_failures = self._tokens = 0
        self._resumed_s: list[float] = []
        self._latency_s = 0.0

    def look(self, run: Run, now_s: float, events_in_flight: int = 0) -> Progress:
        """The run `now_s` seconds after its start. Turns in flight have had that many events with tokens."""
        self._read(run)
        tokens = self._tokens + events_in_flight
        arrived = [due for agent, due in zip(self._trace, self._due_s, strict=True) if agent.arrival_s <= now_s]
        p50, p99 = np.percentile(self._resumed_s, (50, 99)).tolist() if self._resumed_s else (None, None)
        return Progress(
            elapsed_s=now_s,
            planned=self._planned,
            completed=self._read_turns,
            failed=sum(failure.turn is not None for failure in run.failures[: self._read_failures]),
            thinking=sum(due is not None and due > now_s for due in arrived),
            generating=sum(due is not None and due <= now_s for due in arrived),
            done=arrived.count(None),
            resumed_p50_s=p50,
            resumed_p99_s=p99,
            agents=len(self._trace),
            tokens=tokens,
            tokens_per_s=tokens / now_s if now_s else 0.0,
            sessions=by_tier(told) if (told := run.samples[-1].sessions if run.samples else {}) else {},
            left_s=self._left(now_s),
        )

    def _read(self, run: Run) -> None:
        """The run may grow meanwhile: what comes later is read next time."""
        turns, failures = len(run.turns), len(run.failures)
        for record in run.turns[self._read_turns : turns]:
            self._completed(record)
        for failure in run.failures[self._read_failures : failures]:
            self._failed(failure)
        self._read_turns, self._read_failures = turns, failures

    def _completed(self, record: TurnRecord) -> None:
        think_s = self._trace[record.agent].turns[record.turn].think_s
        over_s = record.sent_s + record.latency_s
        self._due_s[record.agent] = None if think_s is None else over_s + think_s
        self._next[record.agent] = record.turn + 1
        self._tokens += record.cost.completion_tokens
        self._latency_s += record.latency_s
        if record.turn > 0:
            self._resumed_s.append(record.ttft_s)

    def _failed(self, failure: Failure) -> None:
        """A turn that fails is its agent's last."""
        if failure.agent is not None and failure.turn is not None:
            self._due_s[failure.agent] = None

    def _left(self, now_s: float) -> float | None:
        """Until the last agent is through, if turns go on as they have."""
        if not self._read_turns:
            return None
        latency_s = self._latency_s / self._read_turns
        ends = [
            max(due, now_s) + _rest(agent, turn, latency_s)
            for agent, turn, due in zip(self._trace, self._next, self._due_s, strict=True)
            if due is not None
        ]
        return max(ends, default=now_s) - now_s


def _rest(agent: AgentPlan, first: int, latency_s: float) -> float:
    """How long the turns from `first` on and the thinking between them take."""
    turns: Sequence[float | None] = [turn.think_s for turn in agent.turns[first:]]
    return len(turns) * latency_s + sum(think_s for think_s in turns if think_s is not None)
