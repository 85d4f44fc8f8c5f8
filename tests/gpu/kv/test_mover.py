"""Workers: in which order they get what they are ordered to do, for what they wait, and which bytes they copy."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import app.gpu.kv.pools
from app.domain.values import SessionId
from app.gpu.device.streams import PASSED, CpuStreams, DeviceStreams, streams_of
from app.gpu.kernels.attention import attention_for
from app.gpu.kv.file import DiskStore
from app.gpu.kv.mover import KVMover, MoveQueue, send_kv
from app.gpu.kv.pools import HostPool, KVPool, SharedHostPool
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.state.kv_header import KVFileHeader, KVIdentity, KVLayout
from app.gpu.state.moves import HalfPass, Move, Moved, MoveKind
from tests.gpu.breakpoints.breaking_models import TinyModel
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.driving import tcp_pair

READ, WRITE, DELETE = MoveKind.FROM_DISK, MoveKind.TO_DISK, MoveKind.DELETE


def order_of(given: list[tuple[MoveKind, str]]) -> list[Move]:
    queue = MoveQueue()
    for number, (kind, session) in enumerate(given):
        queue.put(Move(number, kind, SessionId(session)), PASSED)
    queue.close()
    done = []
    while (found := queue.get()) is not None:
        done.append(found[0])
    return done


@given(given=st.lists(st.tuples(st.sampled_from([READ, WRITE, DELETE]), st.sampled_from("abcd")), max_size=12))
def test_what_is_ordered_for_one_session_is_done_in_its_order_and_reads_that_depend_on_nothing_come_first(
    given: list[tuple[MoveKind, str]],
) -> None:
    done = order_of(given)
    assert sorted(move.number for move in done) == list(range(len(given)))
    for session in "abcd":
        numbers = [move.number for move in done if move.session == session]
        assert numbers == sorted(numbers)
    free = [
        number
        for number, (kind, session) in enumerate(given)
        if kind is READ and all(kind is READ for kind, other in given[:number] if other == session)
    ]
    assert [move.number for move in done[: len(free)]] == free


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


def test_a_file_waits_for_the_device_that_reads_the_blocks_it_goes_to(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two blocks of a move are told of before the device has read them, and then are another's."""
    device = DeferredDevice(0, late="to_device")
    monkeypatch.setattr(app.gpu.kv.pools, "PIECE_BYTES", 1)
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


BLOCKS, RUN = 12, 1
HALF = HalfPass(3, RUN)
AWAY, THERE = [4, 5, 6, 1, 2, 9], [0, 1, 2, 3, 7, 8]
"""The last three are of a half pass, and two of them are neighbours."""


def fresh_pool(stack: LayerStack, dtype: torch.dtype | None) -> KVPool:
    pool = KVPool(stack, BLOCKS, 4, dtype=dtype)
    data = pool.data.view(torch.uint8)
    data.copy_(torch.randint(256, data.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def bytes_of(pool: KVPool) -> Tensor:
    return pool.data.view(torch.uint8).clone()


def check_half_pass(pool: KVPool, host: HostPool) -> None:
    before = bytes_of(pool)
    host.copy_out(AWAY, THERE, host.now(), HALF)
    copied = host.data[THERE].count_nonzero(dim=1)
    assert copied[3:].max() < copied[:3].min() / 2
    pool.data.view(torch.uint8).zero_()
    host.copy_in(THERE, AWAY, host.now(), HALF)
    after = bytes_of(pool)
    assert torch.equal(after[AWAY[:3]], before[AWAY[:3]])
    assert torch.equal(after[AWAY[3:], :RUN], before[AWAY[3:], :RUN])
    assert not after[AWAY[3:], RUN:].any()
    others = [block for block in range(BLOCKS) if block not in AWAY]
    assert not after[others].any()


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_half_pass_is_copied_up_to_its_layer(
    tiny_llama: TinyModel, ranks: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = fresh_pool(tiny_llama.stack, dtype)
    monkeypatch.setattr(app.gpu.kv.pools, "PIECE_BYTES", 2 * pool.data[0].nbytes)
    slab = os.memfd_create("djinn-kv-host")
    host = HostPool(pool, BLOCKS, CpuStreams())
    if ranks:
        host = SharedHostPool(pool, BLOCKS, CpuStreams(), rank=1, ranks=ranks, slab=slab)
    os.close(slab)
    check_half_pass(pool, host)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
def test_a_half_pass_crosses_the_link_of_a_gpu(tiny_llama: TinyModel, dtype: torch.dtype | None) -> None:
    device = torch.device("cuda")
    stack = load_stack(tiny_llama.resolved, device=device, dtype=torch.float32, attention=attention_for(device))
    pool = fresh_pool(stack, dtype)
    check_half_pass(pool, HostPool(pool, BLOCKS, streams_of(device)))
