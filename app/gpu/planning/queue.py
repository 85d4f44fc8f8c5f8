"""The queue of turns, and what each tenant has of the steps that several share. Pure planning: no tensors.

Which tenant comes next is the one that has had the least, by a virtual time for each: start-time fair queueing (Goyal,
Vin and Cheng, 1996) with the counters of "Fairness in Serving Large Language Models" (Sheng et al., 2024).
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TypeVar

from app.domain.breakpoints import STEP_WORK
from app.domain.values import SessionId
from app.gpu.state.blocks import BlockId
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenSequence, TurnState

T = TypeVar("T")

AGING_STEPS = 8
"""So many steps that skip a turn count as the prompts of one step. So a turn waits for about eight times as many tokens
of others as it has itself.
"""


@dataclass(slots=True)
class StepPlan:
    """One step: its rows, the shortest first, and the block copies (source, target) to make before it."""

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list)
    started: list[TurnState] = field(default_factory=list)
    """Turns that have left the queue, for the first time or since they were resumed."""
    preempted: bool = False
    """Whether a turn was preempted. After it the plan admits turns only for tenants with fewer; the next plan may find
    room for one.
    """
    skipped: bool = False
    """Whether a later plan has rows that this one skipped, though nothing else changes. Their breakpoints found no
    `STEP_WORK`, their tenant's prompts rest, or another turn gives its blocks once it has run longer.
    """
    looking_at: TokenSequence | None = None
    """The sequence that is planned now. An error that comes meanwhile ends its turn alone."""
    failure: tuple[TokenSequence, Exception] | None = None
    """The sequence whose turn could not be planned, and the error. The rest of the plan holds without it."""


class TurnQueue:
    """Sequences whose turns are `waiting`, first come, first served, and those that are `running`, oldest first."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self.running: OrderedDict[SessionId, TokenSequence] = OrderedDict()
        self.turns: Counter[str] = Counter()
        """How many of each tenant run, for those that have any."""
        self._tenants: Counter[str] = Counter()
        """How many of each tenant run or wait."""
        self._largest: str | None = None
        """The tenant with the most turns that run. None: it has to be found again."""

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def claims(self, prompts: Iterable[TokenSequence], prompt_tokens: int) -> list[TokenSequence]:
        """`prompts`, which run, and those that wait, in the order of their claims to a step of `prompt_tokens`. First
        comes the turn with the fewest tokens before its next one (shortest remaining time), then the oldest. Each step
        that skips a turn counts as a part of its tokens, so none starves.
        """
        part = max(1, prompt_tokens // AGING_STEPS)
        return sorted(
            [*prompts, *(each for each in self.waiting.values() if not each.active_turn.awaits_prefill)],
            key=lambda each: each.pending - each.active_turn.skipped * part,
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether a turn waits for another server to compute its prompt."""
        return any(each.active_turn.awaits_prefill for each in self.waiting.values())

    @property
    def is_shared(self) -> bool:
        """Whether several tenants have turns that wait or run."""
        return len(self._tenants) > 1

    def append(self, sequence: TokenSequence) -> None:
        """Put a turn at the end of the queue."""
        self.waiting[sequence.session] = sequence
        _count(self._tenants, sequence, 1)

    def prepend(self, sequence: TokenSequence) -> None:
        """Put a turn at the front of the queue."""
        self.append(sequence)
        self.waiting.move_to_end(sequence.session, last=False)

    def start(self, sequence: TokenSequence) -> None:
        """Let a waiting turn run."""
        del self.waiting[sequence.session]
        self.running[sequence.session] = sequence
        self._largest = None
        _count(self.turns, sequence, 1)

    def preempt(self, sequence: TokenSequence) -> None:
        """Put the sequence's turn at the front of the queue if it runs."""
        if self.runs(sequence):
            self.remove(sequence)
            self.prepend(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget the sequence's turn, if it waits or runs."""
        waited = self.waiting.pop(sequence.session, None) is not None
        ran = self.running.pop(sequence.session, None) is not None
        if ran:
            self._largest = None
            _count(self.turns, sequence, -1)
        if waited or ran:
            _count(self._tenants, sequence, -1)

    def runs(self, sequence: TokenSequence) -> bool:
        """Whether the sequence has a turn that runs."""
        return sequence.session in self.running

    def above_share(self, tenant: str) -> TokenSequence | None:
        """The sequence whose turn stops for one of `tenant`: the youngest that runs, of the tenant with the most turns.
        None unless that tenant has at least two more. So no turn takes its place back by the same right.
        """
        if self._largest is None:
            self._largest = max(self.turns, key=self.turns.__getitem__, default=tenant)
        if self.turns[self._largest] < self.turns[tenant] + 2:
            return None
        return next(each for each in reversed(self.running.values()) if each.tenant == self._largest)


def _count(turns: Counter[str], sequence: TokenSequence, change: int) -> None:
    turns[sequence.tenant] += change
    if not turns[sequence.tenant]:
        del turns[sequence.tenant]


class VirtualTime:
    """How much of one resource each tenant has had, in any unit: tokens, bytes or work.

    No tenant saves up. A tenant that begins to wait has had no less than those that wait already. A tenant that waits
    for room falls behind by `most_behind` at most. Each resource has its own times: with one time for all, a tenant
    would wait for tokens because it had work that no other wanted.
    """

    def __init__(self, most_behind: float) -> None:
        self._most_behind = most_behind
        self._had: dict[str, float] = {}
        self._wanted: dict[str, float] = {}
        """By tenant, what it would have had with all its last claims met. One that has had less still waits."""

    def in_turn(self, claims: Sequence[T], tenant: Callable[[T], str], cost: Callable[[T], float]) -> list[T]:
        """All claims by the virtual time at which each begins. Claims of one tenant keep their order, and each begins
        when the one before it ends. Claims that the next steps cannot reach follow as they are.
        """
        if not claims:  # no tenant waits, so none is behind
            self._had.clear()
            self._wanted.clear()
            return []
        tenants = list(map(tenant, claims))
        wanted = self._wanted = self._join(tenants)
        soon, near, far = min(wanted.values(), default=0.0) + 2 * self._most_behind, list[tuple[float, T]](), list[T]()
        for claim, name in zip(claims, tenants, strict=True):
            begin = wanted[name]
            if begin < soon:
                near.append((begin, claim))
                wanted[name] = begin + cost(claim)
            else:
                far.append(claim)
        near.sort(key=itemgetter(0))
        return [claim for _, claim in near] + far

    def charge(self, tenant: str, cost: float) -> None:
        """Note what a tenant has been given."""
        self._had[tenant] = self._had.get(tenant, 0.0) + cost

    def _join(self, tenants: Collection[str]) -> dict[str, float]:
        """Let these tenants wait; returns their times. Times of others are forgotten once these have had as much."""
        had, waiting = self._had, set(tenants)
        going_on = [had[name] for name, wanted in self._wanted.items() if name in waiting and had[name] < wanted]
        # Tenants whose claims are met in each step count too: others must not fall behind those without bound.
        latest = max([had[name] for name in waiting if name in had] or had.values(), default=0.0)
        least = max(min(going_on, default=latest), latest - self._most_behind)
        joined = {name: max(had.get(name, 0.0), least) for name in waiting}
        self._had = {name: time for name, time in had.items() if time > least} | joined
        return joined.copy()


class Fairness:
    """Bounds what one tenant's turns add to a step, and says whose prompts and breakpoints of the queue come next."""

    def __init__(self, *, prompt_tokens: int, rows: int, prompts_rest: bool) -> None:
        """`prompt_tokens`: of prompts, in a step while there are other turns. `rows`: that decode for one tenant, in a
        step while others have turns. `prompts_rest`: each tenant's do without every second step that others share.
        """
        self.queue = TurnQueue()
        self.prompt_tokens = prompt_tokens
        self.rows = rows
        self.tokens = VirtualTime(2 * prompt_tokens)
        """Of prompts. A token that decodes costs nothing: each turn has one a step."""
        self.work = VirtualTime(2 * STEP_WORK)
        """Of breakpoints: at most `STEP_WORK` in a step, but for a row that is alone in it."""
        self._prompts_rest = prompts_rest
        self._work_left = STEP_WORK
        self._steps = 0
        self._rests: dict[str, int] = {}
        """By tenant, the last step that its prompts do without."""
        self._skipped: dict[SessionId, tuple[str, int]] = {}
        """Rows that found no room for their work, the longest wait first: tenant and work."""
        self._reserved: dict[SessionId, int] = {}
        """Work of this step that is kept for rows that were skipped."""
        self._is_free = True
        """Whether breakpoints have done nothing in this step yet."""

    @property
    def crowded_tokens(self) -> int:
        """Of prompts, in a step while several tenants have turns."""
        return max(1, self.prompt_tokens // 2)

    def begin_step(self) -> None:
        """Count a step, and reserve work in it for rows that were skipped: tenants take turns."""
        self._steps += 1
        for session in self._reserved:
            del self._skipped[session]  # the row has not come: it holds up no more than that step
        self._work_left, self._reserved, self._is_free = STEP_WORK, {}, True
        rows = list(self._skipped.items())
        for session, (_, work) in self.work.in_turn(rows, lambda row: row[1][0], lambda row: row[1][1]):
            if self._reserved and work > self._work_left:
                break
            self._reserved[session] = work
            self._work_left -= work

    def resting_rows(self) -> Collection[SessionId]:
        """Turns that run and do not decode in this step: each has its place in some steps."""
        running = self.queue.running
        if len(running) <= self.rows or not self.queue.is_shared:
            return ()
        seen, resting = Counter[str](), set[SessionId]()
        for session, sequence in running.items():
            tenant = sequence.tenant
            if (seen[tenant] - self._steps * self.rows) % self.queue.turns[tenant] >= self.rows:
                resting.add(session)
            seen[tenant] += 1
        return resting

    def prompt_part(self, budget: int) -> int:
        """Tokens that prompts have of a step: fewer while there are other turns, and fewer still while there are those
        of several tenants. A turn that waits for its KV may run in the next step, and waits for this one to end.
        """
        if len(self.queue) == 1:
            return budget
        return min(budget, self.crowded_tokens if self.queue.is_shared else self.prompt_tokens)

    def prompts_in_turn(
        self, claims: list[TokenSequence], *, decodes: bool
    ) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """The claims of this step in the order of their tenants' turns, and those of tenants whose prompts rest in it.
        `decodes`: whether the step has rows already.

        None rest unless prompts of one tenant hold up turns of another. Turns that wait for room are not held up: they
        get it sooner if the prompts that have it are done sooner.
        """
        if not self.queue.is_shared:
            return claims, []
        most = self.crowded_tokens
        ordered = self.tokens.in_turn(claims, attrgetter("tenant"), lambda each: min(each.pending, most))
        self._rests = {tenant: last for tenant, last in self._rests.items() if last >= self._steps}
        free = [each for each in ordered if each.tenant not in self._rests]
        if self._rests and (decodes or len(self.queue.turns) > 1) and (free or decodes):
            return free, [each for each in ordered if each.tenant in self._rests]
        return ordered, []

    def spend_tokens(self, tenant: str, tokens: int, left: int) -> None:
        """Note tokens of the tenant's prompts in this step, of which `left` were its part: some rows are not cut for
        others. The tenant's prompts do without the next steps for what goes beyond, and where prompts rest, for any.
        """
        self.tokens.charge(tenant, tokens)
        beyond = max(tokens - left, int(self._prompts_rest))
        if beyond > 0:
            until = self._steps - (-beyond // self.crowded_tokens)
            self._rests[tenant] = max(until, self._rests.get(tenant, 0))  # it may go on while others wait for KV

    def waits_for_work(self, session: SessionId) -> bool:
        """Whether the session's row was skipped and finds no room in this step either, if it needs as much."""
        if session in self._reserved or session not in self._skipped:
            return False
        return self._skipped[session][1] > self._work_left and not self._is_only

    def take_work(self, session: SessionId, tenant: str, work: int) -> bool:
        """Whether breakpoints may do so much in the row of the tenant's session in this step; else it is skipped.
        A row that needs more than a step has is alone in it.
        """
        self._work_left += self._reserved.pop(session, 0)
        if work > self._work_left and not self._is_only:
            self._skipped[session] = tenant, work
            return False
        self._work_left -= work
        self.work.charge(tenant, work)
        self._is_free = False
        self._skipped.pop(session, None)
        return True

    def forget(self, session: SessionId) -> None:
        """The session's turn has ended or paused."""
        self._skipped.pop(session, None)
        self._reserved.pop(session, None)

    @property
    def _is_only(self) -> bool:
        return self._is_free and not self._reserved
