"""Every operation in every tier, and what becomes of moves that have been overtaken."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from app.domain.values import Tier
from app.gpu.kv.moves import MoveKind
from app.gpu.kv_tiers.moving import KVTiers
from app.gpu.state.sequence import TokenSequence
from tests.gpu.kv_tiers.tiering import BLOCK_SIZE, Bench, tier_of

OPERATIONS: dict[str, Callable[[KVTiers, TokenSequence], object]] = {
    "park": KVTiers.park,
    "restore": KVTiers.restore,
    "save": lambda tiers, sequence: tiers.files.save(sequence),
    "load": lambda tiers, sequence: tiers.files.load(sequence),
    "turn_round": KVTiers.turn_round,
    "head_back": KVTiers.head_back,
    "drop": KVTiers.drop,
}
LEADS_TO = {
    ("device", "park"): "to_host",
    ("host", "restore"): "to_device",
    ("host", "save"): "to_disk",
    ("disk", "load"): "to_host",
    ("to_host", "turn_round"): "device",
    ("to_device", "turn_round"): "host",
    ("to_disk", "turn_round"): "host",
    ("to_host", "head_back"): "device",
    ("to_disk", "head_back"): "host",
}
HARMLESS = ("turn_round", "head_back")


@pytest.mark.parametrize(("tier", "operation"), list(product(Tier, OPERATIONS)))
def test_every_operation_in_every_tier_leads_where_it_should_or_is_refused(tier: Tier, operation: str) -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.bring_to(sequence, tier)
    if tier in (Tier.HOST, Tier.TO_DEVICE):
        bench.overwrite_device()
    assert tier_of(sequence) is tier
    expected = LEADS_TO.get((tier.value, operation), tier.value if operation in HARMLESS else None)
    if operation == "drop":
        OPERATIONS[operation](bench.tiers, sequence)
        assert tier_of(sequence) is None
    elif expected is None:
        with pytest.raises(RuntimeError, match=f"is in tier {tier}"):
            OPERATIONS[operation](bench.tiers, sequence)
        assert tier_of(sequence) is tier
    else:
        OPERATIONS[operation](bench.tiers, sequence)
        assert sequence.tier == expected
    bench.finish()
    bench.close(sequence)
    bench.finish()
    assert bench.device.owned == bench.host.owned == bench.placement.lower.disk_used == 0


def test_blocks_that_have_their_copy_already_are_not_moved_again() -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.tiers.park(sequence)
    [first] = bench.finish()
    assert len(first.source) == 3
    bench.overwrite_device()
    bench.tiers.restore(sequence)
    bench.finish()
    assert tier_of(sequence) is Tier.DEVICE
    bench.tiers.park(sequence)
    assert bench.orders() == []
    assert tier_of(sequence) is Tier.HOST


def test_what_the_device_still_has_is_not_copied_back() -> None:
    bench = Bench()
    sequence = bench.session(2 * BLOCK_SIZE)
    bench.tiers.park(sequence)
    bench.finish()
    bench.tiers.restore(sequence)
    assert bench.orders() == []
    assert tier_of(sequence) is Tier.DEVICE


def test_copies_of_a_block_that_is_written_meanwhile_do_not_count() -> None:
    """The last block grows while its copy is on its way."""
    bench = Bench()
    sequence = bench.session(10)
    bench.tiers.park(sequence)
    bench.tiers.turn_round(sequence)
    sequence.tokens.append(1)
    bench.cache.reserve(sequence, 1)
    bench.cache.commit(sequence, 11)
    bench.finish()
    assert len(sequence.host_blocks) == 2


def test_a_file_does_not_count_for_tokens_that_have_changed_since() -> None:
    bench = Bench()
    sequence = bench.session(12)
    bench.bring_to(sequence, Tier.DISK)
    bench.tiers.files.load(sequence)
    bench.finish()
    bench.tiers.restore(sequence)
    bench.finish()
    bench.tiers.truncate(sequence, 5)
    sequence.tokens += [9] * 7
    bench.cache.reserve(sequence, 7)
    bench.cache.commit(sequence, 12)
    bench.tiers.park(sequence)
    bench.finish()
    bench.placement.lower.save(sequence)
    assert [move.kind for move in bench.finish()] == [MoveKind.TO_DISK]


def test_a_host_without_room_leaves_the_session_where_it_is() -> None:
    bench = Bench(host=2)
    sequence = bench.session(10)
    assert not bench.tiers.park(sequence)
    assert tier_of(sequence) is Tier.DEVICE
    assert bench.orders() == []


def test_a_file_that_cannot_be_written_leaves_the_kv_on_the_host() -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.bring_to(sequence, Tier.TO_DISK)
    bench.finish(error="disk full")
    assert tier_of(sequence) is Tier.HOST
    assert bench.placement.counts().disk_failures == 1


def test_a_file_that_cannot_be_read_means_computing_again() -> None:
    bench = Bench()
    sequence = bench.session(10)
    bench.bring_to(sequence, Tier.DISK)
    bench.tiers.files.load(sequence)
    bench.finish(error="checksum")
    assert tier_of(sequence) is None
    assert sequence.computed == 0
    assert len(sequence.tokens) == 10


def test_a_return_from_disk_that_was_called_off_can_be_called_again() -> None:
    """What was on its way to the device when the session went back to disk must not be taken for the next read."""
    bench = Bench()
    sequence = bench.session(10)
    bench.bring_to(sequence, Tier.DISK)
    bench.tiers.files.load(sequence)
    bench.finish()
    bench.overwrite_device()
    bench.tiers.restore(sequence)
    bench.tiers.turn_round(sequence)
    bench.placement.lower.save(sequence)
    assert tier_of(sequence) is Tier.DISK
    bench.tiers.files.load(sequence)
    bench.finish()
    assert tier_of(sequence) is Tier.HOST
