"""Which rows of a step compute drafted tokens too (speculative decoding; Leviathan et al., 2023). Pure planning.

A row's draft runs with its last token, and each of its positions chooses a token as if the ones before it had been
chosen. The first that differs from the draft ends the row, so a draft changes no token: a draw depends on nothing but
the request's seed and the position, and the engine drafts only where a token's bits do not depend on its company.
"""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from app.domain.memory_map import DraftCounts
from app.gpu.kv.cache import KVCache
from app.gpu.planning.queue import StepPlan
from app.gpu.sampling import GREEDY_BELOW
from app.gpu.state.drafts import Drafted, Drafter, Guess
from app.gpu.state.paths import runs_plainly
from app.gpu.state.segments import Row

_WORTH = 1.2
"""How many times its cost a drafted token must be expected to bring. Both are estimates, and the tokens that are chosen
are those whose odds are overestimated. A step that products take up gains nothing then, and is left as it is.
"""
_SHARED_STRETCH = 1.25
"""How many times as long drafts may make a step that several tenants share: who has none waits for those of others."""
_SHARE = 0.18
"""Time of one more token over that of a step of one, where nothing has been measured yet: the products of a 135M Llama
in 4-bit blocks take 9 ms for one row and 23 ms for eight; in float32 25 and 40."""
_PRIOR_WEIGHT = 0.5
"""Weight of that, against the variance of the tokens in the steps that were measured."""
_KEPT = 0.97
"""Weight of all earlier steps when one more is noted: about 30 of them count."""


class StepCosts:
    """Seconds of a step as `base + per_token * tokens`: weighted least squares over the last steps, held near a prior
    as long as they are all of one size.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens, self._seconds = 1.0, 1.0
        """Means."""
        self._variance = self._covariance = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._weight = _KEPT * self._weight + 1
        share = 1 / self._weight
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * off_tokens
        self._seconds += share * off_seconds
        self._variance = (1 - share) * (self._variance + share * off_tokens**2)
        self._covariance = (1 - share) * (self._covariance + share * off_tokens * off_seconds)

    @property
    def per_token(self) -> float:
        """Seconds of one more token: never less than none, nor so much that a step without tokens would take less."""
        expected = _SHARE * self._seconds / (1 + _SHARE * (self._tokens - 1))
        slope = (self._covariance + _PRIOR_WEIGHT * expected) / (self._variance + _PRIOR_WEIGHT)
        return min(max(slope, 0.0), self._seconds / self._tokens)

    def seconds(self, tokens: int) -> float:
        """Of a step of so many tokens."""
        return self._seconds + self.per_token * (tokens - self._tokens)


class Drafting:
    """Adds drafts to rows that decode, as long as they are expected to pay for themselves."""

    def __init__(
        self, cache: KVCache, *, max_tokens: int, num_layers: int, max_model_len: int, exact_draws: bool = True
    ) -> None:
        """`max_tokens` is the longest draft of a row; 0: there are none. Without `exact_draws` a token that is drawn
        may depend on how many are drawn with it, so only greedy turns have drafts.
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
        for place, length in enumerate(lengths):
            if length:
                plan.looking_at = plan.rows[place].sequence
                token_ids = [token_id for token_id, _ in guesses[place][:length]]
                plan.rows[place] = self._with_draft(plan.rows[place], token_ids)
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
            return []
        turn = row.turn
        turn.drafter = turn.drafter or Drafter()
        return turn.drafter.guess(row.sequence.tokens, most)

    def _room(self, row: Row) -> int:
        """Most tokens that the row's draft may have: none is the turn's last, none meets a breakpoint or an edit."""
        sequence, turn = row.sequence, row.turn
        if not row.is_plain(self._num_layers) or row.scores_prompt or sequence.interventions:
            return 0
        if turn.sampling.temperature >= GREEDY_BELOW and not self._exact_draws:
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

        Prompts do not count: with them a token takes long to come, but to compute it in a later step is as cheap.
        """
        lengths = [0] * len(rows)
        tokens = sum(row.length for row in rows if row.choices == row.length)
        expected = float(tokens)
        per_token, most_s = self._costs.per_token, stretch * self._costs.seconds(tokens)
        offers = [(odds, number) for number, guess in enumerate(guesses) for _, odds in guess]
        for odds, number in sorted(offers, reverse=True)[: max(0, budget)]:
            is_worth_it = odds * self._costs.seconds(tokens) > _WORTH * per_token * expected
            if not is_worth_it or self._costs.seconds(tokens + 1) > most_s:
                break
            lengths[number] += 1
            tokens, expected = tokens + 1, expected + odds
        return lengths

    def _with_draft(self, row: Row, token_ids: Sequence[int]) -> Row:
        """The row with as many of the tokens as have blocks and may be chosen without ending the turn."""
        cache, sequence, matcher, draft = self._cache, row.sequence, row.turn.matcher, list[Drafted]()
        for token_id in token_ids:
            if token_id in row.turn.stop.stop_token_ids:
                break
            if matcher is not None and (matcher := matcher.after(token_id)) is None:
                break
            draft.append(Drafted(token_id, matcher))
        del draft[cache.reserve_draft(sequence, len(draft)) :]
        return replace(row, length=row.length + len(draft), draft=tuple(draft))
