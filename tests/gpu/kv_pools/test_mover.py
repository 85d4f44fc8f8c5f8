"""Workers that wait for each other, and for other servers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from app.domain.values import KVPolicy, SessionId
from app.gpu.kv import stream
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.header import KVFileHeader
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.gpu.kv.stream import send_kv
from app.gpu.kv_pools.mover import KVMover
from app.model_store.resolve import ResolvedModel
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
