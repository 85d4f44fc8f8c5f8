"""Ids and nested texts."""

import pytest

from app.domain.homes import home_of, home_of_response, new_response_id, new_session_id
from app.domain.text import MAX_NESTING, is_nested_too_deep
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
