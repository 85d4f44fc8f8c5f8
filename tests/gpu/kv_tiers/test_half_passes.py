"""Moves of a session that is paused: of the pass that has stopped they have the layers that it has run."""

from __future__ import annotations

import pytest

from app.domain.values import Tier
from app.gpu.kv.moves import Move, MoveKind
from tests.gpu.kv_tiers.tiering import BLOCK_BYTES, BLOCK_SIZE, LAYERS, LENGTH, Bench, paused_on_host, tier_of

BLOCKS = LENGTH // BLOCK_SIZE


def layers_of(move: Move) -> list[int]:
    """How many layers of each of its blocks a move copies."""
    whole = len(move.source) - move.half.blocks
    return [LAYERS] * whole + [move.half.layers] * move.half.blocks


def bring_back(bench: Bench, computed: int) -> Move:
    """The move by which a session comes back that is paused after one layer, in the pass from `computed` on."""
    paused = paused_on_host(bench, computed)
    bench.overwrite_device()
    assert bench.tiers.restore(paused)
    [move] = bench.finish()
    assert (move.kind, tier_of(paused)) == (MoveKind.IN, Tier.DEVICE)
    half = BLOCKS - bench.device.blocks_for(computed)
    moved = (BLOCKS - half) * BLOCK_BYTES + half * BLOCK_BYTES // LAYERS
    assert paused.traffic.bytes_out == paused.traffic.bytes_in == moved
    assert bench.placement.meter.totals()["in"].bytes == moved
    return move


@pytest.mark.parametrize(
    ("computed", "layers"),
    [
        (0, [1, 1, 1, 1]),
        (BLOCK_SIZE, [LAYERS, 1, 1, 1]),
        (BLOCK_SIZE + 1, [LAYERS, LAYERS, 1, 1]),  # the second block has a token that has run all layers
        (LENGTH - 1, [LAYERS, LAYERS, LAYERS, LAYERS]),
    ],
)
def test_blocks_of_a_half_pass_move_without_the_layers_above(computed: int, layers: list[int]) -> None:
    assert layers_of(bring_back(Bench(), computed)) == layers


def test_blocks_that_the_device_still_has_do_not_move_and_those_of_the_half_pass_do() -> None:
    bench = Bench()
    paused = paused_on_host(bench, 2 * BLOCK_SIZE)
    assert bench.tiers.restore(paused)
    [move] = bench.finish()
    assert layers_of(move) == [1, 1]
    assert move.source == tuple(paused.host_blocks[2:])


def test_a_pass_that_must_be_computed_again_leaves_nothing_half() -> None:
    bench = Bench()
    paused = paused_on_host(bench, 2 * BLOCK_SIZE)
    bench.tiers.forget_half_pass(paused)
    bench.overwrite_device()
    assert bench.tiers.restore(paused)
    [move] = bench.finish()
    assert layers_of(move) == [LAYERS, LAYERS]


def test_a_session_moves_whole_again_once_its_pass_has_ended() -> None:
    bench = Bench()
    paused = paused_on_host(bench, BLOCK_SIZE)
    assert bench.tiers.restore(paused)
    bench.finish()
    bench.tiers.end_pass(paused)
    bench.cache.reserve(paused, LENGTH - BLOCK_SIZE)
    paused.checkpoint = None
    bench.cache.commit(paused, LENGTH)
    bench.tiers.park(paused)
    [move] = bench.finish()
    assert layers_of(move) == [LAYERS] * (BLOCKS - 1)  # the host has the first block from before
