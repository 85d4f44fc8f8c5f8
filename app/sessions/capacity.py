"""What a server did in the last minutes, and how many more agents it has room for."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal

from app.domain.errors import FieldOutOfRange
from app.domain.memory_map import MemoryMap
from app.domain.values import Limits, Phase, SessionState
from app.machine.files import size
from app.sessions.session import Session
from app.sessions.table import SessionTable
from app.settings import Settings

Totals = Mapping[tuple[str, str], float]
"""Counters since the start, by their name in `/metrics` and their label's value, which is empty without a label."""
LOOK_S = 5.0
"""Between two looks at the counters, at least."""
KEPT_S = 900.0
"""The longest that an alert looks back."""
SAMPLE_S = 1.0
HORIZON_S = 120.0
"""Over how long means go for what there is room for."""
FORGOTTEN = 1e-3
"""A mean below this counts as 0: it has fallen to it a quarter of an hour after the last turn."""
MANY_WAITING = 0.5
"""Turns in the queue, on average: more agents would only make it longer."""
FIRST_TOKEN_S = 1.0
"""How long an agent may wait for its first token, unless the caller says."""
TURNS_S = 600.0
"""Turns older than this say nothing of what agents do now."""
LEAST_S = 0.001
"""The shortest turn that is assumed."""

LimitName = Literal[
    "device_memory",
    "all_memory",
    "running_turns",
    "step_rate",
    "moves",
    "sessions",
    "turns_at_once",
    "tokens_per_minute",
    "requests_per_minute",
    "tenant_device_bytes",
]


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many `more` agents like those of the last minutes have room, and why no more."""

    more: int
    text: str


@dataclass(frozen=True, slots=True)
class Agent:
    """What one does, again and again: a turn that computes `prompt_tokens` without KV and generates
    `completion_tokens`, with a history of `context_tokens` then; `think_s` in which its KV stays on the device, and
    `tools_s` in which it may leave. Its first tokens are to come within `first_token_s`.
    """

    context_tokens: int
    prompt_tokens: int
    completion_tokens: int
    think_s: float = 0.0
    tools_s: float = 0.0
    first_token_s: float = FIRST_TOKEN_S


@dataclass(frozen=True, slots=True)
class Estimate:
    """How many agents there are, and how many there may be under each limit; None: not measured yet."""

    agent: Agent
    agents: int
    kv_bytes: int
    turn_s: float | None
    limits: Mapping[LimitName, int | None]

    @property
    def limit(self) -> LimitName:
        """The limit that allows the fewest agents."""
        known = {name: most for name, most in self.limits.items() if most is not None}
        return min(known, key=known.__getitem__)

    @property
    def more(self) -> int:
        """How many agents there is room for."""
        return max(0, (self.limits[self.limit] or 0) - self.agents)


@dataclass(slots=True)
class _Means:
    """Over `HORIZON_S`, of agents: those with KV, its bytes, those of them that are working or about to, with their
    bytes, those that wait for tools or are gone for longer, their turns that ended, and turns in the queue.
    """

    agents: float = 0.0
    kv: float = 0.0
    working: float = 0.0
    kv_of_working: float = 0.0
    away: float = 0.0
    ended: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class _Steps:
    """A step of some tokens takes `fixed_s` and `token_s` for each; the largest one so far had `most` tokens."""

    fixed_s: float
    token_s: float
    most: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens


class RecentCounts:
    """How much the counters of a server have risen over the last minutes: what alerts ask Prometheus for, asked here.

    Used on the event loop only. `read` returns the totals, and of the engine those that a memory map has.
    """

    def __init__(self, read: Callable[[MemoryMap | None], Totals]) -> None:
        self._read = read
        self._last: dict[tuple[str, str], float] = {}
        self._sums = Counter[tuple[str, str]]()
        self._kept = deque[tuple[float, Counter[tuple[str, str]]]](maxlen=int(KEPT_S / LOOK_S) + 1)
        self.note(None)

    def note(self, memory: MemoryMap | None) -> None:
        """Read the totals, unless that was done within `LOOK_S`. A counter that fell began at 0 again: another engine
        has been started.
        """
        now = time.monotonic()
        if self._kept and now - self._kept[-1][0] < LOOK_S:
            return
        for key, total in self._read(memory).items():
            before = self._last.get(key, 0.0)
            self._sums[key] += total - before if total >= before else total  # type: ignore[assignment]  # seconds are no whole numbers
            self._last[key] = total
        self._kept.append((now, self._sums.copy()))

    def by_label(self, name: str, seconds: float) -> Counter[str]:
        """How much a counter has risen over the last `seconds`, by label: since the last look before them."""
        since = time.monotonic() - seconds
        before = next((sums for at, sums in reversed(self._kept) if at <= since), self._kept[0][1])
        rises = {label: total - before[of, label] for (of, label), total in self._sums.items() if of == name}
        return Counter({label: rise for label, rise in rises.items() if rise > 0})

    def intervals(self, names: Sequence[str], seconds: float) -> Iterator[list[float]]:
        """For each two looks in a row within `seconds`: how much each of the counters rose between them."""
        since = time.monotonic() - seconds
        for (_, before), (at, after) in pairwise(self._kept):
            if at >= since:
                rises = after - before
                yield [sum(rise for (of, _), rise in rises.items() if of == name) for name in names]

    def rise(self, name: str, seconds: float) -> int:
        """How much a counter has risen over the last `seconds`, summed over its labels."""
        return int(self.by_label(name, seconds).total())


class Load:
    """What agents have used over the last minutes, and from it how many fit. Used on the event loop only."""

    def __init__(self, table: SessionTable, settings: Settings, recent: RecentCounts) -> None:
        self._table, self._recent, self._max_running = table, recent, settings.max_running
        self._max_sessions = settings.max_sessions
        self._means, self._ended = _Means(), table.agent_turns

    def sample(self) -> None:
        """Look at the sessions, once in `SAMPLE_S`."""
        now, self._ended = _Means(ended=self._table.agent_turns - self._ended), self._table.agent_turns
        for session in self._table:
            now.waiting += session.is_agent and session.state is SessionState.QUEUED
            held = held_by(session)
            if not session.is_agent or not held:
                continue
            now.agents += 1
            now.kv += held
            if session.under_way or session.phase is Phase.READY:
                now.working += 1
                now.kv_of_working += held
            now.away += not session.busy and session.phase in (Phase.IO_WAIT, Phase.IDLE)
        weight = SAMPLE_S / HORIZON_S
        for each in fields(_Means):
            mean = getattr(self._means, each.name)
            mean += weight * (getattr(now, each.name) - mean)
            setattr(self._means, each.name, mean if mean > FORGOTTEN else 0.0)

    def capacity(self, memory: MemoryMap) -> Capacity | None:
        """How many agents fit that do as those of the last minutes; None if no agent did anything."""
        means = self._means
        if not means.working or not means.kv_of_working:
            return None
        each = means.kv / means.agents
        works = min(1.0, means.working / means.agents)
        limits = {
            "memory of the device": _most_at_once(memory.device.total_bytes / each, means.kv_of_working / means.kv),
            "turns in one step": _most_at_once(self._max_running, works),
            "memory of all tiers": _all_bytes(memory) / each,
        }
        limit = min(limits, key=limits.__getitem__)
        more = max(0, math.floor(limits[limit]) - _agents(self._table))
        about = f"each has {size(each)} of KV and works {works:.0%} of the time"
        if means.waiting > MANY_WAITING:
            return Capacity(0, f"turns wait as it is; {about}")
        return Capacity(more, f"{about}, and the limit is the {limit}")

    def estimate(
        self,
        memory: MemoryMap,
        sessions: Collection[Session],
        said: Mapping[str, float],
        limits: Limits,
        *,
        sees_all: bool,
        longest: int,
    ) -> Estimate:
        """How many agents such as the caller has `said`, and else as its `sessions` are, fit under `limits` and those
        of the server. Unless it `sees_all`, no figure tells of others: neither steps nor moves.

        Raises `FieldOutOfRange`.
        """
        self._recent.note(memory)
        steps = self._steps() if sees_all else None
        agent = self._agent(sessions, said, steps, longest)
        tokens = agent.prompt_tokens + agent.completion_tokens
        for name in ("prompt_tokens", "completion_tokens"):
            if name in said and tokens > longest:
                about = f"must be from 1 to {longest}, what the model takes, together with what else a turn adds"
                raise FieldOutOfRange(f"{name} {about}; got {said[name]:.0f}", param=name)
        if not tokens <= agent.context_tokens <= longest:
            about = f"must be from {tokens}, what a turn adds, to {longest}, what the model takes"
            raise FieldOutOfRange(f"context_tokens {about}; got {agent.context_tokens}", param="context_tokens")
        turn_s = None if steps is None else self._turn_s(agent, steps)
        cycle_s = (turn_s or 0.0) + agent.think_s + agent.tools_s
        held = memory.blocks.of(agent.context_tokens) * memory.block_bytes
        # Without a measured turn, an agent is assumed to work and to hold the device all the time.
        works = 1.0 if turn_s is None else turn_s / cycle_s
        stays = 1.0 if turn_s is None else (turn_s + agent.think_s) / cycle_s
        most: dict[LimitName, float | None] = {
            "device_memory": _most_at_once(memory.device.total_bytes / held, stays),
            "all_memory": _all_bytes(memory) / held,
            "running_turns": _most_at_once(self._max_running, works),
            "step_rate": None if steps is None else self._by_rate(agent, steps, cycle_s),
            "moves": self._by_moves(memory, held, cycle_s) if sees_all and agent.tools_s else None,
            "sessions": min(self._max_sessions, limits.sessions or self._max_sessions),
        }
        if limits.turns_at_once is not None:
            most["turns_at_once"] = _most_at_once(limits.turns_at_once, works)
        if limits.device_bytes is not None:
            most["tenant_device_bytes"] = _most_at_once(limits.device_bytes / held, works)
        if limits.tokens_per_minute is not None and cycle_s:
            most["tokens_per_minute"] = limits.tokens_per_minute * cycle_s / (60 * tokens)
        if limits.requests_per_minute is not None and cycle_s:
            most["requests_per_minute"] = limits.requests_per_minute * cycle_s / 60
        whole = {name: None if each is None else math.floor(each) for name, each in most.items()}
        return Estimate(agent, _agents(sessions), held, turn_s, whole)

    def _agent(
        self, sessions: Collection[Session], said: Mapping[str, float], steps: _Steps | None, longest: int
    ) -> Agent:
        """An agent as the caller describes it. Its sessions of the last minutes say what the caller leaves out."""
        recent = [each for each in sessions if each.is_agent and time.time() - each.used_at < TURNS_S]
        turns = [(each, last) for each in recent if (last := each.usage.last) is not None]
        found = {
            "context_tokens": [len(each.history) for each, _ in turns],
            "prompt_tokens": [last.prompt_tokens - last.cached_tokens for _, last in turns],
            "completion_tokens": [last.completion_tokens for _, last in turns],
        }
        known: dict[str, float] = {name: max(1, round(sum(each) / len(each))) for name, each in found.items() if each}
        known |= said
        for name in found:
            if name not in known:
                message = f"{name} must be from 1 to {longest}: no turn of the last minutes says how many"
                raise FieldOutOfRange(message, param=name)
        known |= {name: int(known[name]) for name in found}
        if "context_tokens" not in said:
            known["context_tokens"] = max(known["context_tokens"], known["prompt_tokens"] + known["completion_tokens"])
        agent = Agent(**known)  # type: ignore[arg-type]
        means = self._means
        if steps is not None and means.ended and means.agents:
            cycle_s = means.agents * SAMPLE_S / means.ended  # Little's law
            tools_s = said.get("tools_s", cycle_s * means.away / means.agents)
            think_s = said.get("think_s", cycle_s * max(0.0, means.agents - means.working - means.away) / means.agents)
            agent = replace(agent, tools_s=round(tools_s, 3), think_s=round(think_s, 3))
        return agent

    def _steps(self) -> _Steps | None:
        """How long steps take, by least squares over the last minutes; None: none has been timed."""
        names = ("djinn_steps_total", "djinn_step_tokens_total", f"{_BETWEEN_TOKENS}_sum", f"{_BETWEEN_TOKENS}_count")
        seen = list[tuple[float, float, float]]()
        for steps, tokens, seconds, count in self._recent.intervals(names, KEPT_S):
            if steps and count:
                seen.append((steps, tokens / steps, seconds / count))
        weight = sum(each for each, _, _ in seen)
        if not weight:
            return None
        mean_tokens = sum(each * tokens for each, tokens, _ in seen) / weight
        mean_s = sum(each * seconds for each, _, seconds in seen) / weight
        spread = sum(each * (tokens - mean_tokens) ** 2 for each, tokens, _ in seen)
        both = sum(each * (tokens - mean_tokens) * (seconds - mean_s) for each, tokens, seconds in seen)
        # If all steps had the same size, no part of their time counts as fixed. The estimate is then too low.
        most_s = mean_s / mean_tokens
        token_s = min(most_s, max(0.0, both / spread)) if spread > 1e-6 * weight else most_s
        return _Steps(mean_s - token_s * mean_tokens, token_s, max(tokens for _, tokens, _ in seen))

    def _turn_s(self, agent: Agent, steps: _Steps) -> float:
        """Seconds that a turn takes while as many others run as may."""
        turn_s = agent.prompt_tokens * steps.token_s + agent.completion_tokens * steps.seconds(self._max_running)
        return max(LEAST_S, turn_s)

    def _by_rate(self, agent: Agent, steps: _Steps, cycle_s: float) -> float:
        """How many agents leave the device idle enough for first tokens in time (M/M/1, processor sharing)."""
        tokens = max(self._max_running, steps.most)
        rate = tokens / steps.seconds(tokens)
        alone_s = steps.seconds(agent.prompt_tokens)
        busy = agent.first_token_s / (agent.first_token_s + alone_s)
        return busy * rate * cycle_s / (agent.prompt_tokens + agent.completion_tokens)

    def _by_moves(self, memory: MemoryMap, held: int, cycle_s: float) -> float | None:
        """How many agents can leave the device and come back once in each cycle."""
        speeds = [memory.moves[way].bytes_per_s for way in ("out", "in") if way in memory.moves]
        known = [speed for speed in speeds if speed]
        return min(known) * cycle_s / held if known else None


_BETWEEN_TOKENS = "djinn_inter_token_latency_seconds"


def _most_at_once(places: float, share: float) -> float:
    """Of how many agents that work that share of the time, each by itself, there are seldom more at work than places:
    two standard deviations of the binomial distribution above its mean.
    """
    spread = 2 * math.sqrt(share * (1 - share))
    return ((math.sqrt(spread**2 + 4 * share * places) - spread) / (2 * share)) ** 2


def held_by(session: Session) -> int:
    """Bytes of its KV. A copy does not make it larger."""
    kv = session.kv
    return max(kv.device_bytes, kv.host_bytes, kv.disk_bytes)


def _agents(sessions: Collection[Session] | SessionTable) -> int:
    return sum(each.is_agent and held_by(each) > 0 for each in sessions)


def _all_bytes(memory: MemoryMap) -> int:
    return sum(tier.total_bytes for tier in (memory.device, memory.host, memory.disk))
