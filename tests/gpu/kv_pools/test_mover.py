"""Workers: in which order they get what they are ordered to do, and for what they wait."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import app.gpu.kv_pools.host
from app.domain.values import SessionId
from app.gpu.device.streams import PASSED, CpuStreams, DeviceStreams
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.header import KVFileHeader, KVIdentity, KVLayout
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.gpu.kv.stream import send_kv
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from app.gpu.kv_pools.mover import KVMover
from app.gpu.kv_pools.orders import Orders
from tests.gpu.breakpoints.breaking_models import TinyModel
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.driving import tcp_pair

READ, WRITE, DELETE = MoveKind.FROM_DISK, MoveKind.TO_DISK, MoveKind.DELETE

GIVEN = st.lists(st.tuples(st.sampled_from([READ, WRITE, DELETE]), st.sampled_from("abcd")), max_size=12)


def order_of(given: list[tuple[MoveKind, str]]) -> list[Move]:
    """The moves in the order in which they come out."""
    orders = Orders[Move, None]()
    for number, (kind, session) in enumerate(given):
        orders.put(Move(number, kind, SessionId(session)), None)
    orders.close()
    done = []
    while (order := orders.get()) is not None:
        done.append(order[0])
    return done


@given(given=GIVEN)
def test_what_is_ordered_for_one_session_is_done_in_its_order(given: list[tuple[MoveKind, str]]) -> None:
    done = order_of(given)
    assert sorted(move.number for move in done) == list(range(len(given)))
    for session in "abcd":
        numbers = [move.number for move in done if move.session == session]
        assert numbers == sorted(numbers)


@given(given=GIVEN)
def test_reads_that_depend_on_nothing_come_first(given: list[tuple[MoveKind, str]]) -> None:
    free = [
        number
        for number, (kind, session) in enumerate(given)
        if kind is READ and all(kind is READ for kind, other in given[:number] if other == session)
    ]
    assert [move.number for move in order_of(given)[: len(free)]] == free


def test_who_waits_gets_what_comes_and_none_once_it_is_over() -> None:
    orders, got = Orders[Move, None](), list[object]()
    worker = threading.Thread(target=lambda: got.extend(iter(orders.get, None)))
    worker.start()
    orders.put(Move(1, WRITE, SessionId("a")), None)
    orders.put(Move(2, READ, SessionId("b")), None)
    orders.close()
    worker.join(timeout=5)
    assert len(got) == 2


ID = SessionId("ses_a_1")

SOON_S = 60.0


def make_pools(model: TinyModel, streams: DeviceStreams) -> tuple[KVPool, HostPool, KVIdentity]:
    pool, stack = KVPool(model.stack, 8, 4), model.stack
    identity = KVIdentity("", 512, KVLayout(stack.num_layers, stack.kv_heads, 4, stack.head_dim, "float32"))
    return pool, HostPool(pool, 10, streams), identity


class LateDeletes(DiskStore):
    """A disk that would delete a file after another one has taken its place."""

    def __init__(self, folder: Path, identity: KVIdentity) -> None:
        super().__init__(folder, identity)
        self._written = threading.Event()

    def delete(self, session: SessionId) -> None:
        self._written.wait(0.3)
        super().delete(session)

    def write(self, session: SessionId, header: KVFileHeader, blocks: Iterable[memoryview]) -> int:
        size = super().write(session, header, blocks)
        self._written.set()
        return size


def test_a_file_is_received_behind_the_end_of_the_one_before(tiny_llama: TinyModel, tmp_path: Path) -> None:
    _, host, identity = make_pools(tiny_llama, CpuStreams())
    mover = KVMover(host, identity, LateDeletes(tmp_path, identity))
    header = KVFileHeader(identity, tuple(range(5, 10)), 4)
    out, into = tcp_pair()
    with out:
        send_kv(out, header, [memoryview(bytearray(identity.layout.block_bytes))])
    mover.connections.put(0, into)
    reports = SimpleQueue[Moved]()
    mover.start(reports.put)
    received = Move(2, MoveKind.RECEIVE, ID, token_ids=tuple(header.token_ids), connection=0)
    mover.submit([Move(1, MoveKind.DELETE, ID), received])
    ended = [reports.get(timeout=SOON_S) for _ in range(2)]
    assert [(each.number, each.error) for each in ended] == [(1, None), (2, None)]
    assert [path.name for path in tmp_path.iterdir()] == [f"{ID}.safetensors"]
    mover.stop()


def test_the_end_waits_for_no_other_server(tiny_llama: TinyModel) -> None:
    _, host, identity = make_pools(tiny_llama, CpuStreams())
    mover, reports = KVMover(host, identity, None), SimpleQueue[Moved]()
    out, into = tcp_pair()
    mover.connections.put(0, into)
    mover.start(reports.put)
    with out:
        moves = [Move(number, MoveKind.RECEIVE, ID, connection=number) for number in range(2)]
        mover.submit(moves)  # nothing comes over the first, and the second never comes itself
        stopping = threading.Thread(target=mover.stop, daemon=True)
        stopping.start()
        stopping.join(5.0)  # half as long as another server may be silent
        assert not stopping.is_alive()
    ended = [reports.get(timeout=SOON_S) for _ in range(2)]
    assert all(each.error for each in ended)


def test_a_file_waits_for_the_device_that_reads_the_blocks_it_goes_to(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two blocks of a move are told of before the device has read them, and then are another's."""
    device = DeferredDevice(0, late="to_device")
    monkeypatch.setattr(app.gpu.kv_pools.host, "PIECE_BYTES", 1)
    pool, host, identity = make_pools(tiny_llama, device)
    monkeypatch.setattr(HostPool, "late_bytes", 2 * pool.data[0].nbytes)
    for block, memory in enumerate(host.views(range(10))):
        memory[:] = bytes([block + 1]) * len(memory)
    mover = KVMover(host, identity, DiskStore(tmp_path, identity))
    saved = mover.carry_out(Move(1, MoveKind.TO_DISK, ID, (8, 9), token_ids=tuple(range(9)), computed=8), PASSED)
    blocks = tuple(range(8))
    moved = mover.carry_out(Move(2, MoveKind.IN, SessionId("other"), blocks, blocks, blocks), PASSED)
    assert (saved.error, moved.error, moved.arrived) == (None, None, 0.75)
    mover.follow(moved)
    assert mover.carry_out(Move(3, MoveKind.FROM_DISK, ID, target=(6, 7)), PASSED).error is None
    device.compute.record().synchronize()
    assert [set(memory) for memory in host.views((6, 7))] == [{9}, {10}]
    came = pool.data.view(torch.uint8).view(8, -1)
    assert came[:, 0].tolist() == list(range(1, 9))
