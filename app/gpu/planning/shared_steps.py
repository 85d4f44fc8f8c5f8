"""What a step leaves to each tenant while several have turns. Pure planning: no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from app.domain.values import SessionId
from app.gpu.planning.queue import ActiveTurn, TurnQueue


class SharedSteps:
    """Bounds what one tenant's turns add to a step that others wait for."""

    def __init__(self, queue: TurnQueue, prompt_tokens: int, rows: int, *, prompts_rest: bool) -> None:
        """`prompt_tokens`: of prompts, in a step while there are other turns. `rows`: that decode for one tenant, in a
        step while others have turns. `prompts_rest`: those of a tenant do without each second step beside others.
        """
        self.prompt_tokens = prompt_tokens
        self.rows = rows
        self._prompts_rest = prompts_rest
        self._queue = queue
        self._steps = 0
        self._owed: dict[str, int] = {}
        """By tenant, what its prompts have to make good by doing without a step, in tokens."""

    @property
    def crowded_tokens(self) -> int:
        """Of prompts, in a step while several tenants have turns."""
        return max(1, self.prompt_tokens // 2)

    def resting(self) -> Collection[SessionId]:
        """Those that run and do not decode in the next step: each has its place in some steps. Call it once a step."""
        self._steps += 1
        running = self._queue.running
        if len(running) <= self.rows or not self._queue.is_shared:
            return ()
        seen, resting = Counter[str](), set[SessionId]()
        for session, active in running.items():
            tenant = active.sequence.tenant
            if (seen[tenant] - self._steps * self.rows) % self._queue.turns_of(tenant) >= self.rows:
                resting.add(session)
            seen[tenant] += 1
        return resting

    def part(self, budget: int) -> int:
        """Tokens that prompts have of a step: fewer while there are other turns, and fewer still while there are those
        of several tenants. A turn that waits for its KV may run in the next step, and waits for this one to end.
        """
        if len(self._queue) == 1:
            return budget
        return min(budget, self.crowded_tokens if self._queue.is_shared else self.prompt_tokens)

    def spend(self, tenant: str, tokens: int, left: int) -> None:
        """Note tokens of the tenant's prompts in this step, of which `left` were its part: nobody's load may cut some
        prompts. The tenant makes up for what goes beyond, and where prompts rest for any.
        """
        owed = max(tokens - left, int(self._prompts_rest))
        if owed > 0:
            self._owed[tenant] = self._owed.get(tenant, 0) + owed

    def paid_up(self, claims: list[ActiveTurn], part: int, *, decodes: bool) -> list[ActiveTurn]:
        """The claims without those of tenants that do without this step's `part`, because they have had it before. All,
        if nobody else has any: `decodes` says whether the step has rows already. Call it once a step.
        """
        owing = self._owed
        if not owing:
            return claims
        self._owed = {tenant: owed - part for tenant, owed in owing.items() if owed > part}
        free = [active for active in claims if active.sequence.tenant not in owing]
        if not (self._is_crowded(decodes) and (free or decodes)):
            return claims
        for active in claims:
            active.turn.passed_over += active.sequence.tenant in owing
        return free

    def _is_crowded(self, decodes: bool) -> bool:
        """Whether prompts of one tenant hold up turns of another. Not those that wait for room: they get it the sooner,
        the faster the prompts are done that have it.
        """
        return self._queue.tenants_running > 1 or (self._queue.is_shared and decodes)
