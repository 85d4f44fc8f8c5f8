"""Block tables that are kept from step to step say what the sequences hold now."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.domain.values import SessionId
from app.gpu.state.sequence import TokenSequence
from app.gpu.step.batches import LEAST_ROWS, BlockTables

SESSIONS = 3 * LEAST_ROWS
blocks = st.lists(st.integers(0, 400), max_size=20)
changes = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 400)),
    st.tuples(st.just("drop"), st.integers(0, 20)),
    st.tuples(st.just("replace"), st.integers(0, 400)),
    st.tuples(st.just("move"), blocks),
)
steps = st.lists(
    st.tuples(st.lists(st.integers(0, SESSIONS - 1), min_size=1, unique=True), st.lists(changes, max_size=6)),
    min_size=1,
    max_size=8,
)


def change(sequence: TokenSequence, what: str, value: Any) -> None:
    """As blocks are reserved, given up, written to by one of two that share them, and brought back."""
    if what == "append":
        sequence.blocks += [value]
    elif what == "drop":
        del sequence.blocks[value:]
    elif what == "replace":
        sequence.blocks[-1:] = [value]
    else:
        sequence.blocks = list(value)


@given(st.lists(blocks, min_size=SESSIONS, max_size=SESSIONS), steps)
def test_any_steps_find_the_blocks_of_their_sequences(
    held: list[list[int]], taken: list[tuple[list[int], list[tuple[str, Any]]]]
) -> None:
    sequences = [TokenSequence(SessionId(str(n)), b"", blocks=list(each)) for n, each in enumerate(held)]
    tables = BlockTables()
    for numbers, changed in taken:
        for place, (what, value) in enumerate(changed):
            change(sequences[numbers[place % len(numbers)]], what, value)
        members = [sequences[number] for number in numbers]
        found = tables.of(members)
        assert found.shape == (len(members), max(len(each.blocks) for each in members))
        for row, member in zip(found.tolist(), members, strict=True):
            assert row == member.blocks + [0] * (len(row) - len(member.blocks))


def test_as_many_rows_are_kept_as_steps_have() -> None:
    tables = BlockTables()
    for number in range(20 * LEAST_ROWS):
        tables.of([TokenSequence(SessionId(str(number)), b"", blocks=[number])])
    assert len(tables._written) <= 2 * LEAST_ROWS
