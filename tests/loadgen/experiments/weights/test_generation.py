"""Rates of a batch, from when its sessions' tokens came."""

from __future__ import annotations

import pytest

from loadgen.errors import NotAsMeant
from loadgen.experiments.weights.generation import Generation

TOKENS = ((1, 2, 3), (4, 5, 6))


def test_rates_are_taken_while_every_session_decodes() -> None:
    """From second 2 to second 4: two tokens of the one session, one of the other."""
    found = Generation(TOKENS, [[1.0, 3.0, 4.0], [2.0, 4.0, 5.0]]).timed()
    assert found.first_s == 2.0
    assert found.tokens_per_s == pytest.approx(3 / 2)
    assert found.steps_per_s == pytest.approx(3 / 4)


def test_sessions_that_never_decode_together_have_no_rate() -> None:
    with pytest.raises(NotAsMeant, match="let there be more tokens"):
        Generation(TOKENS, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).timed()


def test_the_fingerprint_is_that_of_the_tokens() -> None:
    times = [[1.0, 2.0, 3.0]] * 2
    found = Generation(TOKENS, times).fingerprint
    assert found == Generation([list(tokens) for tokens in TOKENS], [[0.5, 2.5, 4.0]] * 2).fingerprint
    assert found != Generation((TOKENS[1], TOKENS[0]), times).fingerprint
