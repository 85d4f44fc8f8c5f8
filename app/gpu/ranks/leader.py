"""The other ranks as rank 0 sees them: processes that it starts, orders, and does not outlive."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from app.domain.errors import DjinnError, EngineError
from app.gpu.device.group import Group
from app.gpu.kernels.linear.shard import Shard
from app.gpu.kv.pools import open_slab
from app.gpu.ranks.orders import CopyAcross, Join, Load, Order
from app.machine.cores import free_from_core, without_binding

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""How long a process that has no more orders may take to end."""
NAMED_S = 2.0
"""How long a run that has failed waits for the news that a process has ended: that is the better reason."""

Die = Callable[[str], None]
"""Ends this process, with the reason: ranks that are no longer in step cannot go on."""


class Direction(Enum):
    """Of a copy of blocks, as seen from the device."""

    OUT = 0
    IN = 1


class _Rank:
    """A process that has a part of the model."""

    def __init__(self, rank: int, slab: int) -> None:
        """Raises `OSError` if the machine has no room for one."""
        pairs = [socket.socketpair() for _ in range(3)]
        theirs = [their.fileno() for _, their in pairs]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "app.gpu.ranks", *map(str, [*theirs, slab])],
                pass_fds=[*theirs, slab],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=without_binding(os.environ),
            )
        finally:
            for _, their in pairs:
                their.close()
        self.rank = rank
        self.orders, *copies = (Connection(ours.detach()) for ours, _ in pairs)
        self.copies = dict(zip(Direction, copies, strict=True))

    def end(self) -> str:
        """How the process has ended; waits for it."""
        status = self.process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the process of rank {self.rank} {how}"

    def tell(self, message: Load | Join) -> None:
        """Send what it answers."""
        with suppress(OSError):  # `answer` says how it has ended
            self.orders.send(message)

    def answer(self) -> DjinnError | None:
        """What is wrong, if anything is. Raises EngineError if it has ended."""
        try:
            answer: DjinnError | None = self.orders.recv()
        except (EOFError, OSError):
            raise EngineError(f"the engine could not be started: {self.end()}") from None
        return answer


class Ranks:
    """Ranks 1 and on; this process is rank 0. The engine thread orders, one thread each way copies."""

    def __init__(self, count: int, device: torch.device, die: Die) -> None:
        """Start the processes of `count` - 1 ranks. Raises EngineError if the machine has no room for them."""
        self.count = count
        self.group = Group(0, count, device)
        self.ordered = 0
        """Orders that have been given."""
        self.slab = open_slab()
        self._die = die
        self._closing = False
        self._ended = threading.Event()
        self._failing = threading.Lock()
        self._others: list[_Rank] = []
        try:
            for rank in range(1, count):
                self._others.append(_Rank(rank, self.slab))
        except OSError as error:
            self.close()
            raise EngineError(f"a process of {count} ranks could not be started: {error}") from error

    @property
    def shard(self) -> Shard:
        """That of this process."""
        return Shard(0, self.count, self.group.total, self.group.beside)

    def load(self, load_of: Callable[[int], Load]) -> None:
        """Have each rank load its part, beside this one."""
        for other in self._others:
            other.tell(load_of(other.rank))

    def join(self, device_blocks: int, host_blocks: int) -> None:
        """Wait until all have loaded, have them make room for KV, and connect. Raises what they say is wrong."""
        folder = Path(tempfile.mkdtemp(prefix="djinn-ranks-"))
        try:
            self._wait()
            for other in self._others:
                other.tell(Join(device_blocks, host_blocks, folder / "store"))
            self._wait()
            for other in self._others:
                threading.Thread(target=self._watch, args=(other,), name="djinn-rank", daemon=True).start()
            self.group.join(folder / "store")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def order(self, order: Order) -> None:
        """Give an order to all. They carry it out after those before it."""
        self.ordered += 1
        try:
            for other in self._others:
                other.orders.send(order)
        except OSError as error:
            self.fail(error)

    def run(self, order: Order, page: Tensor, own: Callable[[], Tensor]) -> Tensor:
        """Have all carry out `order` on a page that they get from here, beside `own`, of which this is the result. Once
        they have it there is no way back: what fails here, for want of memory too, ends the process.
        """
        self.order(order)
        try:
            self.group.broadcast(page)
            return own()
        except Exception as error:
            self.fail(error)

    @contextmanager
    def copying(self, direction: Direction, order: CopyAcross) -> Iterator[None]:
        """Have all copy blocks while the context lasts; it ends when they have. As with `run`, there is no way back."""
        try:
            for other in self._others:
                other.copies[direction].send(order)
            yield
            for other in self._others:
                other.copies[direction].recv()
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> NoReturn:
        """End this process: the ranks are no longer in step."""
        if not self._ended.wait(NAMED_S):
            logger.error("a run on %d ranks has failed", self.count, exc_info=error)
            self._end(f"a run on {self.count} ranks has failed: {error}")
        threading.Event().wait()  # the thread that has seen the end of a process ends this one
        raise AssertionError

    def close(self) -> None:
        """End the other processes."""
        if self._closing:
            return
        self._closing = True
        for other in self._others:
            for connection in (other.orders, *other.copies.values()):
                connection.close()
        for other in self._others:
            try:
                other.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()
        self._others.clear()
        self.group.leave()
        os.close(self.slab)

    def _wait(self) -> None:
        for other in self._others:
            if (wrong := other.answer()) is not None:
                raise wrong

    def _watch(self, other: _Rank) -> None:
        free_from_core()
        reason = other.end()
        if not self._closing:
            self._ended.set()
            self._end(reason)

    def _end(self, reason: str) -> None:
        with self._failing:  # the first reason is the one
            self._die(reason)


def end_process(reason: str) -> None:
    """See `Die`."""
    logger.critical("the engine has died: %s", reason)
    os._exit(1)
