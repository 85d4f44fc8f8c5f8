"""What two token histories have in common."""

from __future__ import annotations

import os.path
from array import array

from hypothesis import given
from hypothesis import strategies as st

from app.domain.histories import common_prefix

TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(a=TOKENS, b=TOKENS)
def test_common_prefix_is_pythons(a: list[int], b: list[int]) -> None:
    expected = len(os.path.commonprefix([a, b]))  # noqa: RUF071 (of lists)
    assert common_prefix(array("I", a), array("I", b)) == expected
    assert common_prefix(tuple(a), tuple(b)) == expected
