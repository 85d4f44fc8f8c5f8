"""Whose prompts come next, of several tenants: deficit round robin over tokens (Shreedhar and Varghese, 1995).

A round gives each tenant that has prompts a quantum of tokens. A tenant goes on until it has had that much. What its
last prompt took beyond, it lacks in the rounds that follow. Pure planning: no tensors.
"""

import heapq
from collections.abc import Mapping, Sequence

from app.gpu.planning.queue import ActiveTurn

_STEPS_AHEAD = 4
"""How many steps the turns that are put in order could fill: some of them may have to wait for their KV."""


class TenantShares:
    """Counts the tokens of prompts that each tenant has had, and takes turns from the tenants by rounds.

    Nobody saves up: who comes, or comes back, begins where the others are, and nobody falls behind by more than one
    quantum and one step.
    """

    def __init__(self, quantum: int, step_tokens: int) -> None:
        """`quantum` and `step_tokens`, the most that one step computes, in tokens."""
        self._quantum = quantum
        self._step_tokens = step_tokens
        self._had: dict[str, int] = {}
        """By tenant, in the order in which they came. One without prompts stays while it has had more than others."""
        self._active: tuple[str, ...] = ()
        """Tenants that had prompts when they were last looked at."""

    def order(self, claims: Sequence[ActiveTurn]) -> list[ActiveTurn]:
        """The same turns: those of each tenant in their order, and the tenants by rounds. Turns that the next steps
        cannot reach follow as they are.
        """
        queues: dict[str, list[ActiveTurn]] = {}
        for claim in claims:
            queues.setdefault(claim.sequence.tenant, []).append(claim)
        self._join(queues)
        if len(queues) <= 1:
            return list(claims)
        ordered = self._by_rounds(queues)
        near = set(ordered)
        return ordered + [claim for claim in claims if claim not in near]

    def spend(self, tenant: str, tokens: int) -> None:
        """Note tokens of the tenant's prompts that a step computes."""
        self._had[tenant] += tokens

    def _by_rounds(self, queues: Mapping[str, Sequence[ActiveTurn]]) -> list[ActiveTurn]:
        """The turns that come first."""
        left = {tenant: iter(queue) for tenant, queue in queues.items()}
        places = {tenant: place for place, tenant in enumerate(self._had)}
        rounds = [(self._had[tenant] // self._quantum, places[tenant], self._had[tenant], tenant) for tenant in queues]
        heapq.heapify(rounds)
        ordered, room = list[ActiveTurn](), _STEPS_AHEAD * self._step_tokens
        while rounds and room > 0:
            number, place, had, tenant = heapq.heappop(rounds)
            while had // self._quantum == number and (following := next(left[tenant], None)) is not None:
                ordered.append(following)
                tokens = min(following.sequence.pending, self._step_tokens)
                had, room = had + tokens, room - tokens
            if had // self._quantum > number:
                heapq.heappush(rounds, (had // self._quantum, place, had, tenant))
        return ordered

    def _join(self, tenants: Mapping[str, object]) -> None:
        """Have the tenants that have prompts now begin, or go on."""
        had = self._had
        going_on = [had[tenant] for tenant in self._active if tenant in tenants]
        if going_on:
            least = max(min(going_on), max(going_on) - self._quantum - self._step_tokens)
        else:
            least = max(had.values(), default=0)
        for tenant in tenants:
            had[tenant] = max(had.get(tenant, 0), least)
        for tenant in [each for each in had if each not in tenants and had[each] <= least]:
            del had[tenant]
        self._active = tuple(tenants)
