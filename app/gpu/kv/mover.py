"""Carrying out moves: workers each way between device and host, for the disk, for clients' files, for other servers.

A worker takes its orders in turn, blocks until the bytes have arrived, and reports. The engine goes on meanwhile.
Each move to or from another server has its own worker: two that wait for each other must not stand in one queue. Below
is what goes over such a connection: whole sessions, and prompts that one server computes for the other.
"""

import contextlib
import hashlib
import heapq
import itertools
import logging
import socket
import threading
import time
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from app.domain.values import SessionId
from app.gpu.device.streams import PASSED, Event
from app.gpu.kv.file import DiskStore, read_export, read_lead, without_rest, write_kv_file
from app.gpu.kv.pools import HostPool
from app.gpu.state.kv_header import KVFileDamaged, KVFileError, KVFileHeader, KVFileMismatch, KVIdentity, encode_header
from app.gpu.state.moves import Move, Moved, MoveKind
from app.machine.cores import free_from_core
from app.machine.files import is_full
from app.machine.handover import SocketTable

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
"""How long a connection may take for `SLICE_BYTES`, either way."""
SLICE_BYTES = 1 << 20
"""Sent at once, and waited for at once: a receiver that is woken for less takes turns with the sender."""
PATIENCE_S = 30.0
"""How long a receiver waits for the next bytes: the other server may have to compute a part of a prompt first."""
LEAD_BYTES = 32
"""Of a prompt."""
_PEERS = (MoveKind.SEND, MoveKind.RECEIVE, MoveKind.SEND_PROMPT, MoveKind.RECEIVE_PROMPT)
_WORKERS = {MoveKind.OUT: "out", MoveKind.IN: "in", MoveKind.EXPORT: "files", MoveKind.IMPORT: "files"}


class MoveQueue:
    """First come, first served, but a read from disk passes all moves of other sessions: a turn waits for it, and no
    turn waits for a write. The moves of one session are done in their order.

    Each comes with the point on the device that it must come after. Any thread may put and get; neither takes longer in
    a long queue.
    """

    def __init__(self) -> None:
        self._moves: OrderedDict[int, tuple[Move, Event]] = OrderedDict()
        """By number, in the order of their coming."""
        self._numbers = itertools.count()
        self._of_session: defaultdict[SessionId, deque[int]] = defaultdict(deque)
        self._reads: list[int] = []
        """A heap: reads that no other move of their session comes before."""
        self._closed = False
        self._doing: SessionId | None = None
        """Whose move the worker has."""
        self._came = threading.Condition()

    def put(self, move: Move, ready: Event) -> None:
        """Take a move."""
        with self._came:
            number, waiting = next(self._numbers), self._of_session[move.session]
            if not waiting and move.kind is MoveKind.FROM_DISK:
                heapq.heappush(self._reads, number)
            self._moves[number] = move, ready
            waiting.append(number)
            self._came.notify_all()

    def close(self) -> None:
        """No more come. `get` returns those that are there, and then None."""
        with self._came:
            self._closed = True
            self._came.notify_all()

    def get(self) -> tuple[Move, Event] | None:
        """The next move; waits for one. The worker has done the one before."""
        with self._came:
            self._doing = None
            self._came.notify_all()
            self._came.wait_for(lambda: self._moves or self._closed)
            if not self._moves:
                return None
            found = self._moves.pop(heapq.heappop(self._reads) if self._reads else next(iter(self._moves)))
            session = self._doing = found[0].session
            waiting = self._of_session[session]
            waiting.popleft()  # it is the first of its session
            if not waiting:
                del self._of_session[session]
            elif self._moves[waiting[0]][0].kind is MoveKind.FROM_DISK:
                heapq.heappush(self._reads, waiting[0])
            return found

    def wait_for(self, session: SessionId) -> None:
        """Return when no move of the session waits or is under way."""
        with self._came:
            self._came.wait_for(lambda: session != self._doing and session not in self._of_session)


class KVMover:
    """Owns the copy workers. `disk` is None where there is no disk tier; only exports are written then."""

    def __init__(self, host: HostPool, identity: KVIdentity, disk: DiskStore | None) -> None:
        self._host = host
        self._identity = identity
        self._disk = disk
        self._queues = {name: MoveQueue() for name in ("out", "in", "disk", "files")}
        self._threads: list[threading.Thread] = []
        self._with_peers = set[threading.Thread]()
        self._landings: dict[int, Event] = {}
        """By the number of a move that has been reported before its last bytes are there."""
        self._followed: Event = PASSED
        self._report: Callable[[Moved], None] = lambda report: None
        self.connections = SocketTable()
        """Those to other servers that the engine has been given."""

    def start(self, report: Callable[[Moved], None]) -> None:
        """Start the workers; each end of a move is reported from the worker's thread."""
        self._report = report
        for name, queue in self._queues.items():
            thread = threading.Thread(target=self._work, args=(queue,), name=f"djinn-kv-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Finish what has been ordered, but for what other servers take part in, and end the workers."""
        self.connections.close()
        for queue in self._queues.values():
            queue.close()
        for thread in (*self._threads, *tuple(self._with_peers)):
            thread.join()
        with contextlib.suppress(RuntimeError):  # a device that is lost reads no host block any more
            for landed in (*self._landings.values(), self._followed):
                landed.synchronize()

    def submit(self, moves: Iterable[Move]) -> None:
        """Take orders. What the engine has launched on the device until now comes before them."""
        for move in moves:
            ready = self._host.now()
            if move.kind in _PEERS:
                thread = threading.Thread(target=self._meet_peer, args=(move, ready), name="djinn-kv-peer", daemon=True)
                self._with_peers.add(thread)
                thread.start()
            else:
                self._queues[_WORKERS.get(move.kind, "disk")].put(move, ready)

    def follow(self, report: Moved) -> None:
        """Before a report is accounted for: have the device wait for the last bytes of the move, which may still be on
        their way, with whatever it is given from now on.
        """
        landed = self._landings.pop(report.number, None)
        if landed is not None:
            self._host.follow(landed)
            self._followed = landed

    def _meet_peer(self, move: Move, ready: Event) -> None:
        free_from_core()
        self._report(self.carry_out(move, ready))
        self._with_peers.discard(threading.current_thread())

    def _work(self, queue: MoveQueue) -> None:
        while (found := queue.get()) is not None:
            self._report(self.carry_out(*found))

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
        match move.kind:
            case MoveKind.OUT:
                self._host.copy_out(move.source, move.target, ready, move.half)
            case MoveKind.IN:
                landed, arrived = self._host.copy_in(move.source, move.target, ready, move.half)
                if arrived < 1:
                    self._landings[move.number] = landed
                return Moved(move.number, arrived=arrived)
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
                return self._import(move)
            case MoveKind.SEND:
                header = self._header(move)
                with self.connections.take(move.connection) as connection:
                    sent = send_kv(connection, header, self._spans(move, header.partial, header))
                return Moved(move.number, sent_bytes=sent)
            case MoveKind.RECEIVE:
                return self._receive(move)
            case MoveKind.SEND_PROMPT:
                whole, end = KVFileHeader(self._identity, move.token_ids, len(move.token_ids)), len(move.source)
                partial = range(end - len(whole.partial) if move.ends else end, end)
                with self.connections.take(move.connection, keep=not move.ends) as connection:
                    sent = send_prompt(connection, move, self._spans(move, partial, whole), self._identity)
                return Moved(move.number, sent_bytes=sent)
            case MoveKind.RECEIVE_PROMPT:
                with self.connections.take(move.connection) as connection:
                    return receive_prompt(connection, move, self._host.views(move.target), self._identity)
        return Moved(move.number)

    def _spans(self, move: Move, partial: range, header: KVFileHeader) -> list[memoryview]:
        """The bytes of the source, neighbours joined. Of the `partial` blocks what is beyond the header's tokens is
        zeros: it can be KV of another session.
        """
        first, end = partial.start, partial.stop
        rest = [memoryview(without_rest(block, header)) for block in self._host.views(move.source[first:end])]
        return [*self._host.spans(move.source[:first]), *rest, *self._host.spans(move.source[end:])]

    def _receive(self, move: Move) -> Moved:
        """Fill the first of the target's blocks; without a target the KV goes to the session's file."""
        layout = self._identity.layout
        with self.connections.take(move.connection) as connection:
            connection.settimeout(SILENCE_S)
            header, _ = read_lead(partial(receive, connection), self._identity, len(move.token_ids))
            if tuple(header.token_ids) != move.token_ids:
                raise KVFileDamaged("its history differs from the announced one")
            if header.adapter != move.adapter:
                raise KVFileMismatch("its KV is computed with another adapter than the announced one")
            if move.target or not header.blocks:
                if header.blocks > len(move.target):
                    raise KVFileDamaged(f"{header.blocks} blocks come, and a session has {len(move.target)} at most")
                receive_into(connection, self._host.spans(move.target[: header.blocks]))
            else:
                self._queues["disk"].wait_for(move.session)  # a file of that name may still be deleted
                kept = replace(header, namespace=move.namespace)
                blocks = each_block(connection, header.blocks, layout.block_bytes)
                self._store.write(move.session, kept, blocks)
        return Moved(move.number, computed=header.computed_tokens, behind=header.behind)

    def _import(self, move: Move) -> Moved:
        """Take over a file; without a disk tier only its tokens."""
        path = Path(move.path)
        if self._disk is None:
            header, computed = read_export(path, self._identity, max_tokens=move.max_tokens), 0
        else:
            header = self._disk.adopt(path, move.session, max_tokens=move.max_tokens)
            computed = header.computed_tokens
        return Moved(
            move.number,
            token_ids=tuple(header.token_ids),
            computed=computed,
            behind=header.behind if computed else 0,
            about_at=header.about_at,
            about_bytes=header.about_bytes,
            adapter=header.adapter,
        )

    @property
    def _store(self) -> DiskStore:
        if self._disk is None:
            raise OSError("there is no disk tier")
        return self._disk

    def _header(self, move: Move) -> KVFileHeader:
        given = move.token_ids, move.computed, move.namespace, len(move.about.encode())
        return KVFileHeader(self._identity, *given, behind=move.behind, adapter=move.adapter)


def send_kv(connection: socket.socket, header: KVFileHeader, parts: Sequence[memoryview]) -> int:
    """Send a whole session at once; returns how many bytes. `parts` are the header's blocks, neighbours joined. Raises
    `OSError`. What does not come whole is worth nothing. There is no checksum: TCP has its own, and the two servers
    trust each other.

        header     as that of a file (`state/kv_header.py`), which says whose KV it is and how much
        token_ids  I32 [tokens]
        kv         block after block, as the pool holds them
    """
    connection.settimeout(SILENCE_S)
    return _send(connection, encode_header(header) + array("i", header.token_ids).tobytes(), parts)


def _send(connection: socket.socket, lead: bytes, parts: Sequence[memoryview]) -> int:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(lead)
    for part in parts:
        for first in range(0, len(part), SLICE_BYTES):  # the time limit of `sendall` is for all that it is given
            connection.sendall(part[first : first + SLICE_BYTES])
    return len(lead) + sum(map(len, parts))


def receive(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises `OSError` if they do not come."""
    found = bytearray(count)
    receive_into(connection, [memoryview(found)])
    return bytes(found)


def receive_into(connection: socket.socket, spans: Sequence[memoryview]) -> None:
    """Fill the spans, one after the other. Raises `OSError` if not enough comes."""
    left, least = sum(map(len, spans)), 0
    for span in spans:
        rest = span
        while rest:
            if least != min(left, SLICE_BYTES):
                least = min(left, SLICE_BYTES)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            count = connection.recv_into(rest)
            if not count:
                raise ConnectionError("the other server has closed the connection before all had come")
            rest, left = rest[count:], left - count


def each_block(connection: socket.socket, count: int, block_bytes: int) -> Iterator[memoryview]:
    """The next `count` blocks, one after the other in the same memory."""
    block = memoryview(bytearray(block_bytes))
    for _ in range(count):
        receive_into(connection, [block])
        yield block


def send_prompt(connection: socket.socket, move: Move, parts: Sequence[memoryview], identity: KVIdentity) -> int:
    """Send a part of a prompt, with the lead before the first; returns how many bytes. `parts` are its blocks,
    neighbours joined. Raises `OSError`. The sender has no blocks until the prompt is computed. So they come in parts,
    and end when one of the two closes. What has come by then is of use.

        lead    BLAKE2b of the model's identity, the layout of its KV, and the prompt's tokens
        blocks  one after the other. The receiver has asked for the first of them. Blocks that the window has passed at
                the prompt's end are left out. The last block is filled up with zeros
    """
    connection.settimeout(PATIENCE_S)
    return _send(connection, _lead(move, identity) if move.begins else b"", parts)


def receive_prompt(connection: socket.socket, move: Move, blocks: Iterable[memoryview], identity: KVIdentity) -> Moved:
    """Receive a prompt, as much of it as comes. Raises `KVFileMismatch`."""
    connection.settimeout(PATIENCE_S)
    layout, tokens = identity.layout, len(move.token_ids)
    end = layout.token_blocks(tokens, 0)
    places = [*layout.groups.held(list(range(move.first, end)), move.behind - move.first), end]
    computed = move.first // layout.groups.size * layout.block_size
    try:
        if receive(connection, LEAD_BYTES) != _lead(move, identity):
            raise KVFileMismatch("the other server has another model, or computes another prompt")
        for block, following in zip(blocks, places[1:], strict=True):
            receive_into(connection, [block])
            computed = min(following // layout.groups.size * layout.block_size, tokens)
    except OSError as error:
        return Moved(move.number, computed=computed, error=str(error))
    return Moved(move.number, computed=computed)


def _lead(move: Move, identity: KVIdentity) -> bytes:
    header = encode_header(KVFileHeader(identity, move.token_ids, len(move.token_ids)))
    return hashlib.blake2b(header + array("i", move.token_ids).tobytes(), digest_size=LEAD_BYTES).digest()
