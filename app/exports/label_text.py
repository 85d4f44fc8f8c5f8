"""The text of a label, looked at before its fields are: each value and each error in it holds up all others."""

from __future__ import annotations

import json
from typing import Any

from app.domain.limits import MAX_LABEL_BYTES
from app.domain.nesting import has_more_values, is_nested_too_deep
from app.machine.units import size

MAX_VALUES = 1 << 18
"""Beside those of log-probabilities: 4,096 edits of the session and as many of its turn have about 160,000."""
TOKEN_VALUES = 64
"""Of the log-probabilities of one token, with 20 others."""
MAX_NAMES = 1024
"""In one object: as many as a `logit_bias` has."""


def most_values(tokens: int) -> int:
    """The most values that the label of a session of so many tokens has, lists and objects included."""
    return MAX_VALUES + TOKEN_VALUES * tokens


def has_room(text: bytes, tokens: int) -> bool:
    """Whether a server would import the label of a session of so many tokens."""
    return len(text) <= MAX_LABEL_BYTES and not has_more_values(text, most_values(tokens))


def check_text(text: bytes, tokens: int) -> None:
    """Raise `ValueError` for a text that is no label of a session of so many tokens, or no JSON."""
    if not has_room(text, tokens):
        raise ValueError(f"it may have {size(MAX_LABEL_BYTES)} and {most_values(tokens)} values")
    if not is_nested_too_deep(text):  # which the fields refuse
        json.loads(text, object_pairs_hook=_check_names)


def _check_names(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > MAX_NAMES:
        raise ValueError(f"an object in it has {len(pairs)} names; there may be from 0 to {MAX_NAMES}")
