"""Blocks of a pool that shrinks, and hashes of what blocks hold."""

from hypothesis import given
from hypothesis import strategies as st

from app.gpu.state.blocks import chain_hash


@given(tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64), data=st.data())
def test_blocks_that_differ_in_anything_have_other_hashes(tokens: list[int], data: st.DataObject) -> None:
    """Or a session would read the KV of other tokens, edits or tenants."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    hashes = [
        chain_hash(b"tenant", tokens),
        chain_hash(b"tenant", changed),
        chain_hash(b"another", tokens),
        chain_hash(b"tenant", tokens, b"edit"),
    ]
    assert len(set(hashes)) == 4
    assert hashes[0] == chain_hash(b"tenant", tuple(tokens))
