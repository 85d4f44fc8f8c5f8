"""Carrying out moves: workers each way between device and host, for the disk, for clients' files, for other servers.

A worker takes its orders in turn, blocks until the bytes have arrived, and reports. The engine goes on meanwhile.
Each move to or from another server has a worker of its own: two that wait for each other must not stand in one queue.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from app.gpu.device.streams import PASSED, Event
from app.gpu.kv.disk import DiskStore
from app.gpu.kv.file import read_kv_file, write_kv_file
from app.gpu.kv.host_pool import LANDED, HostPool
from app.gpu.kv.move_queue import Orders
from app.gpu.kv.remote_prompts import PromptStreams
from app.gpu.kv.stream import each_block, receive_into, receive_lead, send_kv
from app.gpu.kv.transport import OpenWay, SocketTransport
from app.gpu.state.kv_header import KVFileDamaged, KVFileError, KVFileHeader, KVFileMismatch, KVIdentity
from app.gpu.state.moves import Move, Moved, MoveKind
from app.machine.cores import free_from_core
from app.machine.disk import is_full
from app.machine.handover import SocketTable

logger = logging.getLogger(__name__)

_PEERS = (MoveKind.SEND, MoveKind.RECEIVE, MoveKind.SEND_PROMPT, MoveKind.RECEIVE_PROMPT)
_WORKERS = {MoveKind.OUT: "out", MoveKind.IN: "in", MoveKind.EXPORT: "files", MoveKind.IMPORT: "files"}


class KVMover:
    """Owns the copy workers. `disk` is None where there is no disk tier; only exports are written then."""

    def __init__(
        self,
        host: HostPool,
        identity: KVIdentity,
        disk: DiskStore | None,
        open_way: OpenWay = SocketTransport,
    ) -> None:
        """`open_way` is how prompts go to other servers, and come from them."""
        self._host = host
        self._identity = identity
        self._disk = disk
        self._queues = {name: Orders[Move, Event]() for name in ("out", "in", "disk", "files")}
        self._threads: list[threading.Thread] = []
        self._with_peers = set[threading.Thread]()
        self._landings: dict[int, Event] = {}
        """By the number of a move that has been reported before its last bytes are there."""
        self._followed: Event = PASSED
        self._report: Callable[[Moved], None] = lambda report: None
        self.connections = SocketTable()
        """Those to other servers that the engine has been given."""
        self.prompts = PromptStreams(host, identity, self.connections, open_way)

    def start(self, report: Callable[[Moved], None]) -> None:
        """Start the workers; each end of a move is reported from the worker's thread."""
        self._report = report
        for name, orders in self._queues.items():
            thread = threading.Thread(target=self._work, args=(orders, report), name=f"djinn-kv-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Finish what has been ordered, but for what other servers take part in, and end the workers."""
        self.connections.close()
        for orders in self._queues.values():
            orders.close()
        for thread in (*self._threads, *tuple(self._with_peers)):
            thread.join()
        with contextlib.suppress(RuntimeError):  # a device that is lost reads no host block any more
            for landed in (*self._landings.values(), self._followed):
                landed.synchronize()

    def submit(self, moves: Iterable[Move]) -> None:
        """Take orders. What the engine has launched on the device until now comes before them."""
        for move in moves:
            if move.kind in _PEERS:
                self._begin(move, self.now())
                continue
            self._queues[_WORKERS.get(move.kind, "disk")].put(move, self.now())

    def follow(self, report: Moved) -> None:
        """Before a report is accounted for: have the device wait for the last bytes of the move, which may still be on
        their way, with whatever it is given from now on.
        """
        landed = self._landings.pop(report.number, None)
        if landed is not None:
            self._host.follow(landed)
            self._followed = landed

    def now(self) -> Event:
        """The point on the device that a move which is ordered now must come after."""
        return self._host.now()

    def _begin(self, move: Move, ready: Event) -> None:
        """Carry out a move on a thread of its own."""

        def work() -> None:
            free_from_core()
            self._report(self.carry_out(move, ready))
            self._with_peers.discard(threading.current_thread())

        thread = threading.Thread(target=work, name="djinn-kv-peer", daemon=True)
        self._with_peers.add(thread)
        thread.start()

    def _work(self, orders: Orders[Move, Event], report: Callable[[Moved], None]) -> None:
        while (order := orders.get()) is not None:
            report(self.carry_out(*order))

    def carry_out(self, move: Move, ready: Event) -> Moved:
        """Do one move on the calling thread, behind `ready`; whatever goes wrong is in the report."""
        started = time.perf_counter()
        if move.kind not in (MoveKind.OUT, MoveKind.IN):
            self._followed.synchronize()  # the device may still read host blocks that now belong to this move
        try:
            report = self._do(move, ready)
        except KVFileError as error:
            report = Moved(move.number, error=str(error), is_mismatch=isinstance(error, KVFileMismatch))
        except OSError as error:
            report = Moved(move.number, error=str(error), disk_is_full=is_full(error))
        except Exception as error:
            logger.exception("move %s failed", move.kind)
            report = Moved(move.number, error=str(error))
        return replace(report, seconds=(time.perf_counter() - started) / report.arrived)

    def _do(self, move: Move, ready: Event) -> Moved:
        done = Moved(move.number)
        match move.kind:
            case MoveKind.OUT:
                self._host.copy_out(move.source, move.target, ready, move.half)
            case MoveKind.IN:
                landing = self._host.copy_in(move.source, move.target, ready, move.half)
                if landing is not LANDED:
                    self._landings[move.number] = landing.event
                done = Moved(move.number, arrived=landing.share)
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
            case MoveKind.SEND:
                with self.connections.take(move.connection) as connection:
                    sent = send_kv(connection, self._header(move), self._host.spans(move.source))
                done = Moved(move.number, sent_bytes=sent)
            case MoveKind.RECEIVE:
                done = self._receive(move)
            case MoveKind.SEND_PROMPT:
                done = self.prompts.send(move)
            case MoveKind.RECEIVE_PROMPT:
                done = self.prompts.receive(move)
        return done

    def _receive(self, move: Move) -> Moved:
        """Fill the first of the target's blocks; without a target the KV goes to the session's file."""
        layout = self._identity.layout
        with self.connections.take(move.connection) as connection:
            header = receive_lead(connection, self._identity, max_tokens=len(move.token_ids))
            if tuple(header.token_ids) != move.token_ids:
                raise KVFileDamaged("its history differs from the announced one")
            if move.target or not header.blocks:
                receive_into(connection, self._host.spans(move.target[: header.blocks]))
            else:
                self._queues["disk"].wait_for(move.session)  # a file of that name may still be deleted
                kept = KVFileHeader(self._identity, move.token_ids, header.computed_tokens, move.namespace)
                blocks = each_block(connection, header.blocks, layout.block_bytes)
                self._store.write(move.session, kept, blocks)
        return Moved(move.number, computed=header.computed_tokens)

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
