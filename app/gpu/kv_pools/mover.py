"""Carrying out moves: workers each way between device and host, for the disk, and for clients' files.

A worker takes its orders in turn, blocks until the bytes have arrived, and reports. The engine goes on meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from app.gpu.device.streams import Event
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.file import read_kv_file, write_kv_file
from app.gpu.kv.header import KVFileError, KVFileHeader, KVIdentity
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.gpu.kv_pools.host import HostPool
from app.gpu.kv_pools.orders import Orders
from app.machine.disk import is_full

logger = logging.getLogger(__name__)

_WORKERS = {MoveKind.OUT: "out", MoveKind.IN: "in", MoveKind.EXPORT: "files", MoveKind.IMPORT: "files"}


class KVMover:
    """Owns the copy workers. `disk` is None where there is no disk tier; only exports are written then."""

    def __init__(self, host: HostPool, identity: KVIdentity, disk: DiskStore | None) -> None:
        self._host = host
        self._identity = identity
        self._disk = disk
        self._queues = {name: Orders[Move, Event]() for name in ("out", "in", "disk", "files")}
        self._threads: list[threading.Thread] = []

    def start(self, report: Callable[[Moved], None]) -> None:
        """Start the workers; each end of a move is reported from the worker's thread."""
        for name, orders in self._queues.items():
            thread = threading.Thread(target=self._work, args=(orders, report), name=f"djinn-kv-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Finish what has been ordered and end the workers."""
        for orders in self._queues.values():
            orders.close()
        for thread in self._threads:
            thread.join()

    def submit(self, moves: Iterable[Move]) -> None:
        """Take orders. What the engine has launched on the device until now comes before them."""
        for move in moves:
            self._queues[_WORKERS.get(move.kind, "disk")].put(move, self.now())

    def now(self) -> Event:
        """The point on the device that a move which is ordered now must come after."""
        return self._host.now()

    def _work(self, orders: Orders[Move, Event], report: Callable[[Moved], None]) -> None:
        while (order := orders.get()) is not None:
            report(self.carry_out(*order))

    def carry_out(self, move: Move, ready: Event) -> Moved:
        """Do one move on the calling thread, behind `ready`; whatever goes wrong is in the report."""
        started = time.perf_counter()
        try:
            report = self._do(move, ready)
        except KVFileError as error:
            report = Moved(move.number, error=str(error))
        except OSError as error:
            report = Moved(move.number, error=str(error), disk_is_full=is_full(error))
        except Exception as error:
            logger.exception("move %s failed", move.kind)
            report = Moved(move.number, error=str(error))
        return replace(report, seconds=time.perf_counter() - started)

    def _do(self, move: Move, ready: Event) -> Moved:
        done = Moved(move.number)
        match move.kind:
            case MoveKind.OUT:
                self._host.copy_out(move.source, move.target, ready)
            case MoveKind.IN:
                self._host.copy_in(move.source, move.target, ready)
            case MoveKind.EXPORT:
                blocks = self._host.views(move.source)
                write_kv_file(Path(move.path), self._header(move), blocks, move.about.encode())
            case MoveKind.TO_DISK:
                self._store.write(move.session, self._header(move), self._host.views(move.source))
            case MoveKind.FROM_DISK:
                self._store.read(move.session, self._host.views(move.target))
            case MoveKind.DELETE:
                self._store.delete(move.session)
            case MoveKind.IMPORT:
                done = self._import(move)
        return done

    def _import(self, move: Move) -> Moved:
        """Take over a file; without a disk tier only its tokens."""
        path = Path(move.path)
        if self._disk is None:
            header, computed = read_kv_file(path, self._identity, max_tokens=move.max_tokens), 0
        else:
            header = self._disk.adopt(path, move.session, max_tokens=move.max_tokens)
            computed = header.computed_tokens
        return Moved(
            move.number,
            token_ids=tuple(header.token_ids),
            computed=computed,
            about_at=header.about_at,
            about_bytes=header.about_bytes,
        )

    @property
    def _store(self) -> DiskStore:
        if self._disk is None:
            raise OSError("there is no disk tier")
        return self._disk

    def _header(self, move: Move) -> KVFileHeader:
        about_bytes = len(move.about.encode())
        return KVFileHeader(self._identity, move.token_ids, move.computed, move.namespace, about_bytes)
