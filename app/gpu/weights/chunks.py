"""The rule by which weights share the bus."""

from __future__ import annotations


def chunks(nbytes: int, chunk_bytes: int) -> list[slice]:
    """The bytes of a bundle in runs of at most `chunk_bytes`, each of which is one copy.

    A GPU has one copy engine for each direction. It ends the copy that it has begun, then takes the next one of
    whichever stream has one ready. So a KV move or a step's inputs, on streams of their own, wait for at most one chunk
    of weights, not for all bundles that have been ordered. Long chunks cost the others time; short ones cost bandwidth.
    """
    return [slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes)]
