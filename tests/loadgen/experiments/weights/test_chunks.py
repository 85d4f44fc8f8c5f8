"""Which size of copies is chosen."""

from __future__ import annotations

import pytest

from loadgen.experiments.weights.chunks import choose, chunk_rows
from loadgen.experiments.weights.findings import ChunkSample


def sample(size: int, first_s: float, bytes_per_s: float, repeat: int = 0) -> ChunkSample:
    return ChunkSample(size, repeat, first_s, 10.0, bytes_per_s)


@pytest.mark.parametrize(
    ("samples", "size", "share"),
    [
        ([sample(64, 1.0, 100.0), sample(16, 0.9, 99.0), sample(8, 0.5, 97.0)], 16, 0.99),
        ([sample(64, 1.0, 100.0), sample(16, 1.1, 99.0)], 64, 1.0),
        ([sample(64, 1.0, 100.0)], 64, 1.0),
    ],
)
def test_the_earliest_first_token_of_those_near_the_best_bandwidth(
    samples: list[ChunkSample], size: int, share: float
) -> None:
    choice = choose(chunk_rows(samples))
    assert choice is not None
    assert (choice.chunk_bytes, choice.share_of_best) == (size, share)


def test_medians_decide() -> None:
    rows = chunk_rows([sample(16, first_s, 100.0, repeat) for repeat, first_s in enumerate((9.0, 1.0, 1.1))])
    (row,) = rows
    assert (row.first_s.median, row.first_s.low, row.first_s.high) == (1.1, 1.0, 9.0)


def test_without_samples_nothing_is_chosen() -> None:
    assert choose(chunk_rows([])) is None
