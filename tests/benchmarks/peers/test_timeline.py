"""Rates worked out by hand from a few arrival times."""

import pytest

from benchmarks.peers.timeline import Stream, measure_decode


def test_throughput_counts_from_the_first_submission_to_the_last_token() -> None:
    early = Stream(submitted=10.0, arrivals=[11.0, 12.0, 13.0], tokens=3)
    late = Stream(submitted=10.5, arrivals=[12.0, 13.0, 14.0], tokens=3)

    phase = measure_decode([early, late])

    assert (phase.streams, phase.tokens, phase.wall_s) == (2, 6, 4.0)
    assert phase.throughput == pytest.approx(6 / 4)
    assert phase.first_token_s == [1.0, 1.5]


def test_decode_rate_leaves_out_what_came_before_every_stream_had_begun() -> None:
    early = Stream(submitted=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], tokens=4)
    late = Stream(submitted=0.0, arrivals=[2.0, 3.0, 4.0], tokens=3)

    assert measure_decode([early, late]).decode_rate == pytest.approx(4 / 2)


def test_tokens_that_share_a_chunk_are_all_counted() -> None:
    one_by_one = Stream(submitted=0.0, arrivals=[1.0, 2.0, 3.0, 4.0], tokens=4)
    in_pairs = Stream(submitted=0.0, arrivals=[2.0, 4.0], tokens=4)

    assert measure_decode([in_pairs]).throughput == measure_decode([one_by_one]).throughput
    assert measure_decode([in_pairs]).decode_rate == pytest.approx(2 / 2)


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param([], id="no stream"),
        pytest.param([Stream(0.0, [], 0)], id="no token"),
        pytest.param([Stream(0.0, [1.0], 1)], id="nothing after the first token"),
    ],
)
def test_a_phase_without_a_rate_is_refused(streams: list[Stream]) -> None:
    with pytest.raises(ValueError, match="token"):
        measure_decode(streams)
