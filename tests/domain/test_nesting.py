"""The depth of texts that need not be JSON."""

from __future__ import annotations

import pytest

from app.domain.nesting import MAX_NESTING, is_nested_too_deep


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
