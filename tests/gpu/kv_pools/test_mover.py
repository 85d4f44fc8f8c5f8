"""Workers that wait for each other, and for other servers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

import app.gpu.kv_pools.host
from app.domain.values import KVPolicy, SessionId
from app.gpu.device.streams import PASSED
from app.gpu.kv import stream
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.header import KVFileHeader, KVIdentity, KVLayout
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.gpu.kv.stream import send_kv
from app.gpu.kv_pools.device import KVPool
from app.gpu.kv_pools.host import HostPool
from app.gpu.kv_pools.mover import KVMover
from app.model_store.resolve import ResolvedModel
from tests.gpu.breakpoints.breaking_models import TinyModel
from tests.gpu.device.deferring import DeferredDevice
from tests.gpu.tiny_engine import make_engine, model

__all__ = ["model"]

ID = SessionId("ses_a_1")
SOON_S = 60.0


def make_mover(model: ResolvedModel, folder: Path | None = None) -> KVMover:
    return make_engine(model, host_blocks=10, policy=KVPolicy.SIGNAL, kv_dir=folder)._mover


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        return out, server.accept()[0]


def test_a_file_is_received_behind_the_end_of_the_one_before(
    model: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover, written = make_mover(model, tmp_path), threading.Event()
    write, delete = DiskStore.write, DiskStore.delete

    def late_delete(self: DiskStore, session: SessionId) -> None:
        written.wait(1.0)
        delete(self, session)

    def noted_write(self: DiskStore, *args: object) -> int:
        size = write(self, *args)  # type: ignore[arg-type]
        written.set()
        return size

    monkeypatch.setattr(DiskStore, "delete", late_delete)
    monkeypatch.setattr(DiskStore, "write", noted_write)
    header = KVFileHeader(mover._identity, tuple(range(5, 10)), 4)
    out, into = tcp_pair()
    with out:
        send_kv(out, header, [memoryview(bytearray(mover._identity.layout.block_bytes))])
    mover.connections.put(0, into)
    reports = SimpleQueue[Moved]()
    mover.start(reports.put)
    mover.submit(
        [
            Move(1, MoveKind.DELETE, ID),
            Move(2, MoveKind.RECEIVE, ID, token_ids=tuple(header.token_ids), connection=0),
        ]
    )
    ended = [reports.get(timeout=SOON_S) for _ in range(2)]
    assert [(each.number, each.error) for each in ended] == [(1, None), (2, None)]
    assert [path.name for path in tmp_path.iterdir()] == [f"{ID}.safetensors"]
    mover.stop()


def test_the_end_waits_for_no_other_server(model: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SILENCE_S", 10 * SOON_S)
    mover, reports = make_mover(model), SimpleQueue[Moved]()
    out, into = tcp_pair()
    mover.connections.put(0, into)
    mover.start(reports.put)
    with out:
        moves = [Move(number, MoveKind.RECEIVE, ID, connection=number) for number in range(2)]
        mover.submit(moves)  # nothing comes over the first, and the second never comes itself
        stopping = threading.Thread(target=mover.stop, daemon=True)
        stopping.start()
        stopping.join(SOON_S)
        assert not stopping.is_alive()
    ended = [reports.get(timeout=SOON_S) for _ in range(2)]
    assert all(each.error for each in ended)


def test_a_file_waits_for_the_device_that_reads_the_blocks_it_goes_to(
    tiny_llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two blocks of a move are told of before the device has read them, and then are another's."""
    pool, device = KVPool(tiny_llama.stack, 8, 4), DeferredDevice(0, late="to_device")
    monkeypatch.setattr(app.gpu.kv_pools.host, "PIECE_BYTES", 1)
    monkeypatch.setattr(HostPool, "late_bytes", 2 * pool.data[0].nbytes)
    host = HostPool(pool, 10, device)
    for block, memory in enumerate(host.views(range(10))):
        memory[:] = bytes([block + 1]) * len(memory)
    stack = tiny_llama.stack
    identity = KVIdentity("", 512, KVLayout(stack.num_layers, stack.kv_heads, 4, stack.head_dim, "float32"))
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
