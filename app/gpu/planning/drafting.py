"""Which rows of a step compute drafted tokens too (speculative decoding; Leviathan et al., 2023). Pure planning.

A row's draft runs beside its last token, and each of its positions chooses a token as if the ones before it had been
chosen. The first that differs from the draft ends the row, so a draft changes no token: a draw depends on nothing but
the request's seed and the position, and the engine drafts only where a token's bits do not depend on its company.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from app.domain.memory_map import DraftCounts
from app.gpu.kv.cache import KVCache
from app.gpu.planning.draft_costs import StepCosts
from app.gpu.planning.step_plan import StepPlan
from app.gpu.sampling.requests import draws
from app.gpu.state.drafts import Drafted, Drafter, Guess
from app.gpu.state.paths import runs_plainly
from app.gpu.state.segments import Row

_WORTH = 1.2
"""How many times its cost a drafted token must be expected to bring. Both are estimates, and the tokens that are chosen
are those whose odds are overestimated. A step that products take up gains nothing then, and is left as it is.
"""
_SHARED_STRETCH = 1.25
"""How many times as long drafts may make a step that several tenants share: who has none waits for those of others."""


class Drafting:
    """Adds drafts to rows that decode, as long as they are expected to pay for themselves."""

    def __init__(
        self, cache: KVCache, *, max_tokens: int, num_layers: int, max_model_len: int, exact_draws: bool = True
    ) -> None:
        """`max_tokens` is the longest draft of a row; 0: there are none. Without `exact_draws` a token that is drawn
        may depend on how many are drawn beside it, so only turns that take the most likely one have drafts.
        """
        self.max_tokens = max_tokens
        self._cache = cache
        self._num_layers = num_layers
        self._max_model_len = max_model_len
        self._exact_draws = exact_draws
        self._costs = StepCosts()
        self._drafted = self._accepted = 0

    def counts(self) -> DraftCounts:
        """Drafts that have been computed."""
        return DraftCounts(self._drafted, self._accepted)

    def add_drafts(self, plan: StepPlan, budget: int, *, is_shared: bool) -> None:
        """Give drafts to some of the plan's rows, of together at most `budget` tokens, and fewer if several tenants
        share the step (`is_shared`); blocks that those write to are reserved. A draft takes blocks that are available
        now: nothing gives way to it.
        """
        if not self.max_tokens:
            return
        guesses = list[Guess]()
        for row in plan.rows:
            plan.looking_at = row.sequence
            guesses.append(self._guess(row))
        plan.looking_at = None
        lengths = self._choose(plan.rows, guesses, budget, _SHARED_STRETCH if is_shared else math.inf)
        for place, (row, guess, length) in enumerate(zip(plan.rows, guesses, lengths, strict=True)):
            if length:
                plan.looking_at = row.sequence
                plan.rows[place] = self._with_draft(row, guess.token_ids[:length])
        plan.looking_at = None

    def note_accepted(self, computed: int, accepted: int) -> None:
        """Note how many drafted tokens of a row were computed, and how many of them were chosen."""
        self._drafted += computed
        self._accepted += accepted

    def note_step(self, rows: Sequence[Row], seconds: float) -> None:
        """Note how long a step took; one with prompts says nothing about drafts."""
        if self.max_tokens and all(row.choices == row.length for row in rows):
            self._costs.note(sum(row.length for row in rows), seconds)

    def _guess(self, row: Row) -> Guess:
        most = self._room(row)
        if most <= 0:
            return Guess()
        turn = row.turn
        turn.drafter = turn.drafter or Drafter()
        return turn.drafter.guess(row.sequence.tokens, most)

    def _room(self, row: Row) -> int:
        """Most tokens that the row's draft may have: none is the turn's last, none meets a breakpoint or an edit."""
        sequence, turn = row.sequence, row.turn
        if not row.is_plain(self._num_layers) or row.scores_prompt or sequence.interventions:
            return 0
        if draws(turn.sampling) and not self._exact_draws:
            return 0
        length = len(sequence.tokens)
        left = min(turn.stop.max_tokens - turn.generated(length), self._max_model_len - length)
        room = min(self.max_tokens, left - 1)
        if sequence.watched:
            positions = range(length, length + room)
            room = next((at - length for at in positions if not runs_plainly(sequence, turn, at)), room)
        return room

    def _choose(self, rows: Sequence[Row], guesses: Sequence[Guess], budget: int, stretch: float) -> list[int]:
        """How many tokens of each guess to compute. The likeliest come first; one pays if it is expected to bring
        `_WORTH` times as many tokens for its time as the step does without it. All of them make the step at most
        `stretch` times as long.

        Prompts do not count: beside them a token takes long to come, but to compute it in a later step is as cheap.
        """
        lengths = [0] * len(rows)
        tokens = sum(row.length for row in rows if row.choices == row.length)
        expected = float(tokens)
        per_token, most_s = self._costs.per_token, stretch * self._costs.seconds(tokens)
        offers = [(odds, number) for number, guess in enumerate(guesses) for odds in guess.odds]
        for odds, number in sorted(offers, reverse=True)[: max(0, budget)]:
            is_worth_it = odds * self._costs.seconds(tokens) > _WORTH * per_token * expected
            if not is_worth_it or self._costs.seconds(tokens + 1) > most_s:
                break
            lengths[number] += 1
            tokens, expected = tokens + 1, expected + odds
        return lengths

    def _with_draft(self, row: Row, token_ids: Sequence[int]) -> Row:
        cache, sequence, draft = self._cache, row.sequence, _draft(row, token_ids)
        while draft and cache.missing(sequence, row.length + len(draft)) > cache.pool.available:
            draft.pop()
        copies = cache.reserve(sequence, row.length + len(draft))
        assert not copies  # the row itself writes to the last block, so no other session holds it
        return replace(row, length=row.length + len(draft), draft=tuple(draft))


def _draft(row: Row, token_ids: Sequence[int]) -> list[Drafted]:
    """As many of the tokens as may be chosen without ending the turn."""
    draft = list[Drafted]()
    matcher = row.turn.matcher
    for token_id in token_ids:
        if token_id in row.turn.stop.stop_token_ids:
            break
        if matcher is not None:
            matcher = matcher.after(token_id)
            if matcher is None:
                break
        draft.append(Drafted(token_id, matcher))
    return draft
