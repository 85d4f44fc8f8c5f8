"""Ids and nested texts."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.homes import home_of, home_of_response, new_response_id, new_session_id
from app.domain.text import MAX_NESTING, has_more_values, is_nested_too_deep
from app.logs import session_of


@pytest.mark.parametrize("replica", [None, "a", "replica10", "z" * 16])
def test_an_id_names_its_home_and_is_named_by_the_log(replica: str | None) -> None:
    first, second, response = new_session_id(replica), new_session_id(replica), new_response_id(replica)
    assert home_of(first) == home_of_response(response) == replica
    assert home_of(response) is home_of_response(first) is None
    assert session_of({"path_params": {"session_id": first}}) == first
    assert first < second


@pytest.mark.parametrize("home", ["", "A_", "a b_"])
@pytest.mark.parametrize("length", [0, 31, 33, 35, 37])
def test_what_is_no_id_has_no_home(home: str, length: int) -> None:
    assert home_of(f"ses_{home}{'0' * length}") is home_of_response(f"resp_{home}{'0' * length}") is None
    assert session_of({"path_params": {"session_id": f"ses_{home}{'0' * length}"}}) is None


def nested(depth: int) -> str:
    """Lists and objects in turns."""
    return '[{"a":' * (depth // 2) + "[]" * (depth % 2) + "}]" * (depth // 2)


@pytest.mark.parametrize(
    ("text", "is_too_deep"),
    [
        (nested(MAX_NESTING), False),
        (nested(MAX_NESTING + 1), True),
        ("[]" * 1000, False),
        ('["' + "[" * 1000 + '"]', False),
        ('["\\"' + "[" * 1000 + '"]', False),
        ('["\\\\"' + "[" * 1000 + '"]', True),
        ('"\ud800"' + "[" * 1000, True),
    ],
    ids=["all levels", "one more", "side by side", "in a string", "escaped quote", "escaped backslash", "surrogate"],
)
def test_only_open_brackets_outside_strings_count(text: str, is_too_deep: bool) -> None:
    assert is_nested_too_deep(text) is is_too_deep
    assert is_nested_too_deep(text.encode(errors="surrogatepass")) is is_too_deep


def test_brackets_that_close_nothing_cost_no_more_than_a_look() -> None:
    began = time.process_time()
    assert not is_nested_too_deep(b"[" * MAX_NESTING + b"]" * (8 << 20) + b"[")
    assert time.process_time() - began < 0.3


def values_in(value: Any) -> int:
    """Values in a value, itself included; an empty list or object counts twice."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + (sum(map(values_in, value)) or 1) if isinstance(value, list) else 1


PLAIN = st.none() | st.integers() | st.text()
JSON = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(JSON, st.booleans())
def test_values_are_counted_as_a_parser_finds_them(value: Any, is_ascii: bool) -> None:
    text, values = json.dumps(value, ensure_ascii=is_ascii), values_in(value)
    assert not has_more_values(text, values)
    assert has_more_values(text, values - 1)


def test_what_a_string_has_is_no_value_but_strings_side_by_side_are() -> None:
    for text in ('"' + "[," * 1000, '"' + '\\"[,' * 1000 + '"'):
        assert not has_more_values(text, 10)
    assert has_more_values('["' + '","' * 1000 + '"]', 1000)
