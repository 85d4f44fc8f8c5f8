"""The tokens that penalties look at: counted once, and as often as they are there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.planning.turns import sample_requests
from app.gpu.sampling.sampler import place_requests
from app.gpu.state.paths import PassPlan
from app.gpu.state.segments import Row
from app.gpu.state.sequence import TokenCounts, TokenSequence, TurnState

TOKENS = st.lists(st.integers(0, 9), max_size=12)


class ReadHistory(list[int]):
    """Counts what is read of it."""

    read = 0

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_step_reads_no_more_of_a_history_than_what_is_new() -> None:
    history = ReadHistory(range(20_000))
    params = SamplingParams(0, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1)
    turn = TurnState(Ticket(1), params, StopRule(100), 10_000, 0)
    sequence = TokenSequence(SessionId("ses"), b"", tokens=history)
    for _ in range(3):
        history.append(7)
        history.read = 0
        row = Row(sequence, turn, len(history) - 1, 1, PassPlan(0, 4), samples=True, scores_prompt=False)
        changes, _ = place_requests(sample_requests([row]), 50_000, torch.from_numpy)
    assert history.read <= 1
    (repeated, _), (counted, taken_off) = changes["repetition"], changes["counts"]
    assert (len(repeated), len(counted)) == (20_000, 10_001)
    assert taken_off[counted == 7].item() == torch.tensor(0.2 + 3 * 0.1).item()


@given(prompt=TOKENS, steps=st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_counts_are_those_of_the_whole_history(prompt: list[int], steps: list[tuple[list[int], list[int]]]) -> None:
    """Each step adds tokens to the history, and looks at it as if drafted ones followed."""
    history, counts = list(prompt), TokenCounts(len(prompt))
    for new, drafted in steps:
        history += new
        tokens, generated = counts.seen(history, drafted)
        expected = Counter(history[len(prompt) :] + drafted)
        assert len(tokens) == len(set(tokens.tolist()))
        found = dict(zip(tokens.tolist(), generated.tolist(), strict=True))
        assert found == {token: expected[token] for token in (*history, *drafted)}
