"""The depth and the size of texts that need not be JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.nesting import MAX_NESTING, has_more_values, is_nested_too_deep


def nested(depth: int) -> str:
    """Lists and objects in turns."""
    return '[{"a":' * (depth // 2) + "[]" * (depth % 2) + "}]" * (depth // 2)


@pytest.mark.parametrize(
    ("text", "is_too_deep"),
    [
        (nested(MAX_NESTING), False),
        (nested(MAX_NESTING + 1), True),
        ("[]" * 1000, False),
        ("[" * (MAX_NESTING + 1), True),
        ('["' + "[" * 1000 + '"]', False),
        ('["\\"' + "[" * 1000 + '"]', False),
        ('["\\\\"' + "[" * 1000 + '"]', True),
        ('["' + "[" * 1000, False),
        ('"\ud800"' + "[" * 1000, True),
    ],
    ids=[
        "all levels",
        "one more",
        "side by side",
        "never closed",
        "in a string",
        "after an escaped quote",
        "after an escaped backslash",
        "in a string without end",
        "after half of a surrogate pair",
    ],
)
def test_only_open_brackets_outside_strings_count(text: str, is_too_deep: bool) -> None:
    assert is_nested_too_deep(text) is is_too_deep
    assert is_nested_too_deep(text.encode(errors="surrogatepass")) is is_too_deep


def test_brackets_that_close_nothing_cost_no_more_than_a_look() -> None:
    began = time.process_time()
    assert not is_nested_too_deep(b"[" * MAX_NESTING + b"]" * (8 << 20) + b"[")
    assert time.process_time() - began < 0.3


def count(value: Any) -> int:
    """Values in a value, itself included; an empty list or object counts twice."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + (sum(map(count, value)) or 1) if isinstance(value, list) else 1


PLAIN = st.none() | st.integers() | st.text()
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(JSON, st.booleans())
def test_values_are_counted_as_a_parser_finds_them(value: Any, is_ascii: bool) -> None:
    text, values = json.dumps(value, ensure_ascii=is_ascii), count(value)
    assert not has_more_values(text, values)
    assert has_more_values(text, values - 1)


@pytest.mark.parametrize("text", ['"' + "[," * 1000, '"' + '\\"[,' * 1000 + '"'], ids=["no end", "escaped"])
def test_what_a_string_has_is_no_value(text: str) -> None:
    assert not has_more_values(text, 10)


def test_strings_side_by_side_are_values() -> None:
    assert has_more_values('["' + '","' * 1000 + '"]', 1000)
