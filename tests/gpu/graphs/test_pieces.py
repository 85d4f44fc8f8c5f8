"""How runs of layers are cut, and which of the pieces have graphs."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.gpu.graphs.decode import batch_buckets
from app.gpu.graphs.pieces import RECORD_AFTER, KeptGraphs, Piece, cut_run
from app.gpu.graphs.runs import run_buckets


def nothing() -> None:
    """What a replay does here."""


@st.composite
def armed_layers(draw: st.DrawFn) -> tuple[int, set[int]]:
    """How many layers there are, and after which of them a step is cut."""
    layers = draw(st.integers(1, 130))
    return layers, draw(st.sets(st.integers(1, layers)))


@given(armed_layers())
def test_any_armed_layers_give_runs_that_cover_each_layer_once_in_order(drawn: tuple[int, set[int]]) -> None:
    layers, armed = drawn
    bounds = sorted({0, layers, *armed})
    runs = [cut_run(8, lo, hi) for lo, hi in pairwise(bounds)]
    pieces = [piece for run in runs for piece in run]
    assert [layer for piece in pieces for layer in range(piece.lo, piece.hi)] == list(range(layers))
    assert armed <= {0, *(piece.hi for piece in pieces)}
    assert max(map(len, runs)) <= 2 * layers.bit_length()


@given(st.integers(1, 130))
def test_all_runs_together_are_made_of_few_pieces(layers: int) -> None:
    pieces = {piece for lo in range(layers) for hi in range(lo + 1, layers + 1) for piece in cut_run(1, lo, hi)}
    assert len(pieces) < 2 * layers


def test_a_run_without_cuts_is_in_as_few_pieces_as_can_be() -> None:
    assert cut_run(4, 0, 32) == [Piece(4, 0, 32)]
    assert cut_run(4, 0, 30) == [Piece(4, 0, 16), Piece(4, 16, 24), Piece(4, 24, 28), Piece(4, 28, 30)]
    assert cut_run(4, 7, 32) == [Piece(4, 7, 8), Piece(4, 8, 16), Piece(4, 16, 32)]


@given(st.integers(1, 3000))
def test_a_batch_is_at_most_doubled(largest: int) -> None:
    buckets = run_buckets(batch_buckets(largest))
    assert buckets[-1] == largest
    assert len(buckets) <= largest.bit_length() + 1
    for rows in range(1, largest + 1):
        assert next(bucket for bucket in buckets if bucket >= rows) < 2 * rows


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 31), st.integers(1, 32)), max_size=40))
def test_graphs_never_have_more_stages_than_are_allowed(most: int, wanted: list[tuple[int, int]]) -> None:
    kept = KeptGraphs(most)
    for lo, size in wanted:
        for piece in cut_run(1, lo, lo + size):
            kept.find(piece)
        due = kept.due()
        if due is not None:
            kept.make_room(due)
            kept.keep(due, nothing)
            assert kept.find(due) is nothing
        assert kept.stages <= most


def want(kept: KeptGraphs, piece: Piece, times: int = RECORD_AFTER) -> None:
    for _ in range(times):
        kept.find(piece)


def record(kept: KeptGraphs, piece: Piece) -> None:
    want(kept, piece)
    assert kept.due() == piece
    kept.make_room(piece)
    kept.keep(piece, nothing)


def test_a_piece_has_a_graph_once_it_has_been_wanted_as_often_as_that_costs() -> None:
    kept, piece = KeptGraphs(8), Piece(1, 0, 4)
    want(kept, piece, RECORD_AFTER - 1)
    assert kept.due() is None
    want(kept, piece, 1)
    assert kept.due() == piece


def test_the_largest_piece_comes_first() -> None:
    kept = KeptGraphs(8)
    for piece in (Piece(1, 4, 6), Piece(1, 0, 4), Piece(1, 6, 7)):
        want(kept, piece)
    assert kept.due() == Piece(1, 0, 4)


def test_a_piece_that_fits_nowhere_is_never_due() -> None:
    kept = KeptGraphs(8)
    want(kept, Piece(1, 0, 16), 10)
    assert kept.due() is None


def test_the_graph_that_was_replayed_last_gives_way_last_and_the_other_waits_again() -> None:
    kept, first, second, third = KeptGraphs(8), Piece(1, 0, 4), Piece(1, 4, 8), Piece(1, 8, 12)
    record(kept, first)
    record(kept, second)
    assert kept.find(first) is nothing
    record(kept, third)
    assert kept.find(first) is nothing
    assert kept.find(second) is None
    assert kept.due() is None
