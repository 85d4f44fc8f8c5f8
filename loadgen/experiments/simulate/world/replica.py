"""One replica: an engine that computes steps, over tiers.

It plans as `app.gpu.planning` does for a single tenant: what decodes has a token of each step, prompts have a part of
it, the nearest to its next token comes first, and who is passed over comes nearer. Steps in which nothing but decoding
happens are one event, however many they are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count
from random import Random

from simpy import Environment, Event

from loadgen.experiments.simulate.costs import SOON, Costs, StepTimes
from loadgen.experiments.simulate.plan import ClusterPlan
from loadgen.experiments.simulate.world.session import Session, Tier, Turn
from loadgen.experiments.simulate.world.shares import in_order, share
from loadgen.experiments.simulate.world.tally import Tally
from loadgen.experiments.simulate.world.tiers import Tiers

MARGIN_S, MARGIN_STEPS = 0.1, 2
"""How long before its return a session's KV is to be there: so many seconds, and so many steps."""


class Replica:
    """One server. It is `up` unless it is away; it `takes` new sessions; one that is `closing` refuses all turns."""

    def __init__(
        self, env: Environment, number: int, plan: ClusterPlan, costs: Costs, steps: StepTimes, tally: Tally
    ) -> None:
        self.number = number
        self.up = self.takes = True
        self.closing = False
        self.tiers = Tiers(plan, costs, tally.traffic)
        self.sessions: dict[Session, None] = {}
        self.refused: list[Turn] = []
        self.on_change: Callable[[Replica], None] | None = None
        """Told when the number of turns changes."""
        self._env, self._plan, self._steps, self._tally = env, plan, steps, tally
        self._waiting: list[Turn] = []
        self._prompts: list[Turn] = []
        self._rows: list[tuple[int, int, Turn]] = []
        """Turns that decode, by the step after which each is over."""
        self._step = 0
        self._order = count()
        self._wanting: list[tuple[float, int, int, Session]] = []
        """Sessions that are to come back to the device, and for which there was no room."""
        self._began_s = self._step_s = self._longest_s = 0.0
        self._planned = self._run = 0
        self._luck = Random(f"{plan.draw} {number}")
        """Of each step, or of each run of alike ones: a machine that is slow stays so for a while."""
        self._chunks: list[tuple[Turn, int]] = []

    @property
    def turns(self) -> int:
        """Those that run or wait."""
        return len(self._waiting) + len(self._prompts) + len(self._rows)

    def submit(self, turn: Turn) -> None:
        """Take a turn of a session that is here."""
        turn.session.turn = turn
        turn.session.stamp += 1
        turn.pending = turn.session.tokens + turn.new - turn.session.kv
        self._waiting.append(turn)
        self._changed()
        self._hurry()

    def leave(self, session: Session, announced_s: float | None, *, prefetch_s: float | None = None) -> None:
        """The session's agent is away, for `announced_s` as it says, or until it says so after `prefetch_s`. With
        neither it says nothing, and KV stays.
        """
        now, tiers = self._env.now, self.tiers
        session.returns_s = math.inf if announced_s is None else now + announced_s
        if prefetch_s is None if announced_s is None else announced_s < 2 * tiers.restore_s(session):
            tiers.rest(session)
        else:
            tiers.park(session)
            self._expect(session, self._early_s(session) if prefetch_s is None else prefetch_s)
        self._room_is_free()

    def arrive(self, session: Session) -> None:
        """A session has moved here, and its KV to the host."""
        self.sessions[session] = None
        session.place = self.number
        if session.kv:
            self.tiers.receive(session)
            if session.returns_s < math.inf:
                self._expect(session, self._early_s(session))

    def forget(self, session: Session) -> None:
        """The session is not here any more."""
        self.sessions.pop(session, None)
        self.tiers.forget(session)
        if self.up:
            self._room_is_free()

    def die(self) -> list[Turn]:
        """Lose what is in memory. Returns the turns that were here, which have to begin anew."""
        turns = [*self._waiting, *self._prompts, *(turn for _, _, turn in sorted(self._rows))]
        for session in self.sessions:
            if session.tier in (Tier.DEVICE, Tier.HOST):
                session.lose_kv()
        self.tiers.lose_memory()
        for turn in turns:
            turn.session.turn = None
            turn.start_anew()
        self._waiting, self._prompts, self._rows, self._chunks, self._wanting = [], [], [], [], []
        self._run += 1
        self._planned = 0
        self.up = False
        self._changed()
        return turns

    def save(self) -> None:
        """Write all KV to disk, as a server does that ends."""
        for session in self.sessions:
            self.tiers.save(session)

    def come_back(self) -> None:
        """Be up again."""
        self.up = self.takes = True
        self.closing = False
        self._changed()

    def _early_s(self, session: Session) -> float:
        """Seconds until the session's KV has to set out to be here in time."""
        margin_s = MARGIN_S + MARGIN_STEPS * self._longest_s
        return session.returns_s - self._env.now - margin_s - self.tiers.restore_s(session)

    def _expect(self, session: Session, seconds: float) -> None:
        stamp = session.stamp
        self._after(max(0.0, seconds), lambda _: self._prefetch(session, stamp))

    def _prefetch(self, session: Session, stamp: int) -> None:
        if session.stamp == stamp and not self._brought(session):
            heapq.heappush(self._wanting, (session.returns_s, next(self._order), stamp, session))

    def _brought(self, session: Session) -> bool:
        """Whether the session's KV is on its way to the device, from which only those that return later give way."""
        if not self.tiers.take(session, session.kv, self._env.now, before_s=session.returns_s):
            return False
        self.tiers.rest(session)
        return True

    def _room_is_free(self) -> None:
        while self._wanting:
            _, _, stamp, session = self._wanting[0]
            if session.stamp == stamp and session.tier is not Tier.NONE and not self._brought(session):
                break
            heapq.heappop(self._wanting)
        if self._waiting:
            self._hurry()

    def _hurry(self) -> None:
        """Plan anew at the end of the step that runs."""
        if not self._planned:
            self._begin()
        elif self._planned > 1:
            elapsed = self._env.now - self._began_s
            steps = max(1, math.ceil(elapsed / self._step_s - SOON))
            if steps < self._planned:
                self._start(steps, self._began_s + steps * self._step_s - self._env.now)

    def _begin(self) -> None:
        """Begin the next step, or the next steps if they are alike."""
        self._chunks = self._plan_prompts() if self._waiting or self._prompts else []
        rows = len(self._rows)
        if not rows and not self._chunks:
            return
        prompt_tokens = sum(tokens for _, tokens in self._chunks)
        self._step_s = self._steps.mixed(rows, prompt_tokens, self._luck.random())
        self._longest_s = max(self._step_s, 0.95 * self._longest_s)
        self._began_s = self._env.now
        steps = 1 if self._chunks else self._rows[0][0] - self._step
        self._start(steps, steps * self._step_s)

    def _start(self, steps: int, seconds: float) -> None:
        self._planned = steps
        self._run += 1
        run = self._run
        self._after(max(0.0, seconds), lambda _: self._end(run))

    def _end(self, run: int) -> None:
        if run != self._run:
            return
        self._step += self._planned
        self._planned = 0
        now = self._env.now
        for turn, tokens in self._chunks:
            turn.pending -= tokens
            self._tally.computed_tokens += tokens
            if not turn.pending:
                turn.first_s = now
                self._prompts.remove(turn)
                steps = self._steps.needed(len(self._rows) + 1, turn.completion - 1, turn.luck)
                heapq.heappush(self._rows, (self._step + steps, next(self._order), turn))
        while self._rows and self._rows[0][0] <= self._step:
            self._finish(heapq.heappop(self._rows)[2])
        self._begin()

    def _finish(self, turn: Turn) -> None:
        session = turn.session
        session.tokens += turn.new + turn.completion
        session.kv = session.tokens - 1
        session.turn = None
        self._tally.ended(turn, self._env.now)
        self._changed()
        turn.done.succeed()

    def _plan_prompts(self) -> list[tuple[Turn, int]]:
        """Prompts of the next step, with their tokens in it."""
        most = self._plan.step_tokens - len(self._rows)
        if self.turns > 1:
            most = min(most, self._plan.shared_tokens)
        claims = in_order([*self._prompts, *self._waiting], self._plan.shared_tokens)
        shortest = min(turn.pending for turn in claims)
        chosen = self._admit(claims, most, shortest)
        return share(chosen, most)

    def _admit(self, claims: list[Turn], most: int, shortest: int) -> list[Turn]:
        """Those of the claims that run, up to `most` tokens. The others have been passed over once more."""
        chosen, tokens, full = list[Turn](), 0, False
        for turn in claims:
            runs = turn.admitted
            if tokens < most and not runs and not full:
                if len(self._prompts) + len(self._rows) >= self._plan.rows:
                    full = True
                else:
                    runs, full = self._start_turn(turn)
            if tokens >= most or not runs:
                turn.passed_over += 1
                continue
            chosen.append(turn)
            leaves_half = len(chosen) == 1 and turn.pending > shortest
            tokens += min(turn.pending, -(-most // 2)) if leaves_half else turn.pending
        return chosen

    def _start_turn(self, turn: Turn) -> tuple[bool, bool]:
        """Whether a turn that waits runs now, and whether it waits for want of room."""
        session, now = turn.session, self._env.now
        tokens = session.tokens + turn.new + turn.completion
        if not (self.tiers.take(session, tokens, now) or (self._is_empty and self._push_out(turn, tokens))):
            return False, True
        turn.pending = session.tokens + turn.new - session.kv
        if session.kv and session.ready_s > now:
            if not turn.expected:
                turn.expected = True
                self._after(session.ready_s - now, lambda _: self._hurry())
            return False, False
        turn.recomputed += max(0, session.tokens - 1 - session.kv)
        turn.admitted = True
        self._waiting.remove(turn)
        self._prompts.append(turn)
        return True, False

    @property
    def _is_empty(self) -> bool:
        return not (self._prompts or self._rows)

    def _push_out(self, asking: Turn, tokens: int) -> bool:
        """Whether there is room after turns that wait have given theirs, the last first, but for those that are about
        to run.
        """
        for turn in reversed(self._waiting):
            if not (turn is asking or turn.expected) and turn.session.tier is Tier.DEVICE:
                self.tiers.park(turn.session)
                if self.tiers.take(asking.session, tokens, self._env.now):
                    return True
        return False

    def _after(self, seconds: float, then: Callable[[Event], None]) -> None:
        timeout = self._env.timeout(seconds)
        assert timeout.callbacks is not None
        timeout.callbacks.append(then)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self)
