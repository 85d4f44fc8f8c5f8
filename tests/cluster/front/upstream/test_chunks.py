"""The end of a chunked body is found however its bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cluster.front.upstream.chunks import BadChunks, Chunks


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.lists(st.integers(1, 200), min_size=1))
def test_all_but_the_last_chunk_passes_as_it_came(parts: list[bytes], cuts: list[int]) -> None:
    chunks, passed, place = Chunks(), b"", 0
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    whole = body + b"0\r\n\r\n"
    while place < len(whole):
        assert not chunks.is_over
        size = cuts[0]
        cuts = cuts[1:] + cuts[:1]
        passed += chunks.take(whole[place : place + size])
        place += size
    assert (passed, chunks.is_over, chunks.is_clean) == (body, True, True)


@pytest.mark.parametrize("rest", [b"X: trailer\r\n\r\n", b"\r\nHTTP/1.1 200"])
def test_a_connection_is_not_used_again_if_more_comes(rest: bytes) -> None:
    chunks = Chunks()
    assert chunks.take(b"1\r\nx\r\n0\r\n" + rest) == b"1\r\nx\r\n"
    assert (chunks.is_over, chunks.is_clean) == (True, False)


@pytest.mark.parametrize("bad", [b"\r\n", b"-1\r\n", b"+1\r\n", b"xyz\r\n", b"1" * 70, b"1_0\r\n", b" \r\n"])
def test_what_has_no_size_is_no_chunk(bad: bytes) -> None:
    with pytest.raises(BadChunks):
        Chunks().take(bad)
