"""What each tenant has of the steps that several share. Pure planning: no tensors.

Who comes next is the tenant that has had the least, by a virtual time for each: start-time fair queueing (Goyal, Vin
and Cheng, 1996) with the counters of "Fairness in Serving Large Language Models" (Sheng et al., 2024).
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, itemgetter
from typing import TypeVar

from app.domain.breakpoint_work import STEP_WORK
from app.domain.values import SessionId
from app.gpu.planning.queue import ActiveTurn, TurnQueue

T = TypeVar("T")


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
    """Bounds what one tenant's turns add to a step, and says whose prompts and breakpoints come next."""

    def __init__(self, queue: TurnQueue, *, prompt_tokens: int, rows: int, prompts_rest: bool) -> None:
        """`prompt_tokens`: of prompts, in a step while there are other turns. `rows`: that decode for one tenant, in a
        step while others have turns. `prompts_rest`: each tenant's do without every second step that others share.
        """
        self.prompt_tokens = prompt_tokens
        self.rows = rows
        self.tokens = VirtualTime(2 * prompt_tokens)
        """Of prompts. A token that decodes costs nothing: each turn has one a step."""
        self.work = VirtualTime(2 * STEP_WORK)
        """Of breakpoints: at most `STEP_WORK` in a step, but for a row that is alone in it."""
        self._queue = queue
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
        running = self._queue.running
        if len(running) <= self.rows or not self._queue.is_shared:
            return ()
        seen, resting = Counter[str](), set[SessionId]()
        for session, active in running.items():
            tenant = active.sequence.tenant
            if (seen[tenant] - self._steps * self.rows) % self._queue.turns[tenant] >= self.rows:
                resting.add(session)
            seen[tenant] += 1
        return resting

    def prompt_part(self, budget: int) -> int:
        """Tokens that prompts have of a step: fewer while there are other turns, and fewer still while there are those
        of several tenants. A turn that waits for its KV may run in the next step, and waits for this one to end.
        """
        if len(self._queue) == 1:
            return budget
        return min(budget, self.crowded_tokens if self._queue.is_shared else self.prompt_tokens)

    def prompts_in_turn(self, claims: list[ActiveTurn], *, decodes: bool) -> tuple[list[ActiveTurn], list[ActiveTurn]]:
        """The claims of this step in the order of their tenants' turns, and those of tenants whose prompts rest in it.
        `decodes`: whether the step has rows already.

        None rest unless prompts of one tenant hold up turns of another. Turns that wait for room are not held up: they
        get it sooner if the prompts that have it are done sooner.
        """
        if not self._queue.is_shared:
            return claims, []
        most = self.crowded_tokens
        tenant = attrgetter("sequence.tenant")
        ordered = self.tokens.in_turn(claims, tenant, lambda active: min(active.sequence.pending, most))
        self._rests = {tenant: last for tenant, last in self._rests.items() if last >= self._steps}
        if not self._rests:
            return ordered, []
        free = [active for active in ordered if active.sequence.tenant not in self._rests]
        if (decodes or len(self._queue.turns) > 1) and (free or decodes):
            return free, [active for active in ordered if active.sequence.tenant in self._rests]
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
