"""Rank 0, which runs the engine: it starts the other ranks, orders each part of a step, and does not outlive them.

The others embed nothing, and see no edit or checkpoint: rank 0's residual stream at the lower end of a run is all that
they need. Within a run each layer's sums make it whole on every rank.
"""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from app.domain.errors import DjinnError, EngineError, FieldOutOfRange
from app.domain.points import Point, Points
from app.gpu.device.streams import DeviceStreams, Event
from app.gpu.forward.graphs import RunLayers
from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.linear.base import Shard
from app.gpu.kv.pools import KVPool, SharedHostPool
from app.gpu.models import require_shards
from app.gpu.models.base import LayerStack
from app.gpu.models.recipe import Recipe
from app.gpu.ranks.follower import Group, Load, Run
from app.gpu.state.checkpoints import InParts
from app.gpu.state.moves import WHOLE_PASSES, HalfPass
from app.logs import configured
from app.machine.cores import free_from_core, without_binding

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""How long a process that has no more orders may take to end."""
NAMED_S = 2.0
"""How long a run that has failed waits for the news that a process has ended: that is the better reason."""

Die = Callable[[str], None]
"""Ends this process, with the reason: ranks that are no longer in step cannot go on."""
Direction = Literal["out", "in"]
"""Of a copy of blocks, as seen from the device."""


def start_ranks(recipe: Recipe, die: Die) -> Ranks | None:
    """The other ranks, which begin to load their parts, if the setting is not 1. May raise FieldOutOfRange."""
    settings, device = recipe.settings, recipe.device
    count = settings.tensor_parallel
    if count == 1:
        return None
    require_shards(recipe.model, count)
    if settings.weights_device is not None:
        raise FieldOutOfRange(
            "weights_device must be auto with tensor_parallel: each rank keeps its part of the weights",
            param="weights_device",
        )
    if settings.cuda_graphs:
        raise FieldOutOfRange(
            "cuda_graphs must not be set with tensor_parallel: steps of several ranks are not recorded",
            param="cuda_graphs",
        )
    devices = _devices(device, count)
    threads = max(1, torch.get_num_threads() // count)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    ranks = Ranks(count, device, die)
    for other in ranks.others:
        other.tell(Load(replace(recipe, device=devices[other.rank]), other.rank, count, threads, configured()))
    return ranks


def _devices(device: torch.device, count: int) -> list[torch.device]:
    """That of each rank: from `device` on. Raises FieldOutOfRange if there are too few."""
    if device.type == "cpu":
        return [device] * count
    first, found = device.index or 0, torch.cuda.device_count()
    if first + count > found:
        raise FieldOutOfRange(
            f"tensor_parallel must be between 1 and {found - first}: this machine has {found} CUDA devices, and the "
            f"first of the ranks has cuda:{first}; got {count}",
            param="tensor_parallel",
        )
    return [torch.device("cuda", first + rank) for rank in range(count)]


class OtherRank:
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
        self.copies: dict[Direction, Connection] = dict(zip(("out", "in"), copies, strict=True))

    def end(self) -> str:
        """How the process has ended; waits for it."""
        status = self.process.wait()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the process of rank {self.rank} {how}"

    def tell(self, message: Load | tuple[int, int, Path]) -> None:
        """Send what it answers: how to load its part, or how to join the others."""
        with suppress(OSError):  # `wait` says how it has ended
            self.orders.send(message)

    def wait(self) -> None:
        """Wait for the answer. Raises what it says is wrong, EngineError if the process has ended."""
        try:
            wrong: DjinnError | None = self.orders.recv()
        except (EOFError, OSError):
            raise EngineError(f"the engine could not be started: {self.end()}") from None
        if wrong is not None:
            raise wrong


class Ranks:
    """Ranks 1 and on; this process is rank 0. The engine thread orders, one thread each way copies."""

    def __init__(self, count: int, device: torch.device, die: Die) -> None:
        """Start the processes of `count` - 1 ranks. Raises EngineError if the machine has no room for them."""
        self.count = count
        self.group = Group(0, count, device)
        self.ordered = 0
        """Orders that have been given."""
        self.slab = os.memfd_create("djinn-kv-host")
        self._die = die
        self._closing = False
        self._ended = threading.Event()
        self._failing = threading.Lock()
        self.others: list[OtherRank] = []
        try:
            for rank in range(1, count):
                self.others.append(OtherRank(rank, self.slab))
        except OSError as error:
            self.close()
            raise EngineError(f"a process of {count} ranks could not be started: {error}") from error

    @property
    def shard(self) -> Shard:
        """That of this process."""
        return Shard(0, self.count, self.group.total, self.group.beside)

    def join(self, device_blocks: int, host_blocks: int) -> None:
        """Wait until all have loaded, have them make room for KV, and connect. Raises what they say is wrong."""
        folder = Path(tempfile.mkdtemp(prefix="djinn-ranks-"))
        try:
            for other in self.others:
                other.wait()
            for other in self.others:
                other.tell((device_blocks, host_blocks, folder / "store"))
            for other in self.others:
                other.wait()
            for other in self.others:
                threading.Thread(target=self._watch, args=(other,), name="djinn-rank", daemon=True).start()
            self.group.join(folder / "store")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def order(self, name: str, *arguments: Any) -> None:
        """Give an order to all, by the name of a method of `Follower`. They carry it out after those before it."""
        self.ordered += 1
        try:
            for other in self.others:
                other.orders.send((name, arguments))
        except OSError as error:
            self.fail(error)

    def run(self, page: Tensor, own: Callable[[], Tensor], name: str, *arguments: Any) -> Tensor:
        """Have all carry out an order on a page from here, and return what `own` does beside them. Once they have it
        there is no way back: what fails here, for want of memory too, ends the process.
        """
        self.order(name, *arguments)
        try:
            self.group.broadcast(page)
            return own()
        except Exception as error:
            self.fail(error)

    @contextmanager
    def copying(
        self, direction: Direction, after: int, source: Sequence[int], target: Sequence[int], half: HalfPass
    ) -> Iterator[None]:
        """Have all copy blocks after so many orders; the context ends when they have. As with `run`, no way back."""
        try:
            for other in self.others:
                other.copies[direction].send((after, source, target, half))
            yield
            for other in self.others:
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
        for other in self.others:
            for connection in (other.orders, *other.copies.values()):
                connection.close()
        for other in self.others:
            try:
                other.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                other.process.kill()
                other.process.wait()
        self.others.clear()
        self.group.leave()
        os.close(self.slab)

    def _watch(self, other: OtherRank) -> None:
        free_from_core()
        reason = other.end()
        if not self._closing:
            self._ended.set()
            self._end(reason)

    def _end(self, reason: str) -> None:
        with self._failing:  # the first reason is the one
            self._die(reason)


def end_process(reason: str) -> None:
    """End this process at once, with the reason in the log."""
    logger.critical("the engine has died: %s", reason)
    os._exit(1)


def leading_layers(ranks: Ranks, run_layers: RunLayers) -> RunLayers:
    """Layers of all ranks: `run_layers` runs the part that is here, while the others run theirs."""

    def run_on_all(lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        run, page = Run.of(lo, hi, hidden, batch)
        return ranks.run(page, lambda: run_layers(lo, hi, hidden, batch), "run", run)

    return run_on_all


class LeadingStack:
    """A `LayerStack` whose head is that of all ranks. Its layers are the part that is here, for `leading_layers`."""

    def __init__(self, ranks: Ranks, stack: LayerStack) -> None:
        self._ranks, self._stack = ranks, stack
        self.num_layers, self.hidden_size, self.vocab_size = stack.num_layers, stack.hidden_size, stack.vocab_size
        self.kv_heads, self.head_dim, self.max_model_len = stack.kv_heads, stack.head_dim, stack.max_model_len
        self.states = stack.states
        self.dtype, self.device, self.parameter_bytes = stack.dtype, stack.device, stack.parameter_bytes
        self.embed, self.layer, self.normed, self.unembed = stack.embed, stack.layer, stack.normed, stack.unembed
        self.head_in_parts = None
        self.points: Points = {point: shapes for point, shapes in stack.points.items() if point is not Point.FINAL_NORM}
        """A head is one order to all ranks, with nothing between norm and projection."""

    def toward(self, token_id: int) -> InParts[Tensor]:
        raise FieldOutOfRange("tokens: logits are attributed by servers without tensor_parallel", param="tokens")

    def written(
        self, index: int, point: Point, parts: Tensor, whole: Tensor, adapters: Sequence[tuple[Any, Any]]
    ) -> Tensor | None:
        return None

    def head(self, hidden: Tensor) -> Tensor:
        # Out of memory here only shortens the step; after the order to the ranks it would end the engine.
        torch.empty((len(hidden), self.vocab_size), dtype=torch.float32, device=self.device)
        return self._ranks.run(hidden.contiguous(), lambda: self._stack.head(hidden), "head", len(hidden))


class LeadingPool(KVPool):
    """A `KVPool` of which each rank has a part."""

    def __init__(
        self, ranks: Ranks, stack: LayerStack, num_blocks: int, block_size: int, *, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(stack, num_blocks, block_size, dtype=dtype)
        self._ranks = ranks

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._ranks.order("copy_blocks", copies)
        super().copy_blocks(copies)


@dataclass(frozen=True, slots=True)
class _Point:
    """An `Event` on this device, and the orders that the others have been given by then."""

    event: Event
    orders: int

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class LeadingHostPool(SharedHostPool):
    """A `HostPool` whose copies are done when all ranks have done theirs."""

    def __init__(self, ranks: Ranks, device: KVPool, num_blocks: int, streams: DeviceStreams) -> None:
        super().__init__(device, num_blocks, streams, rank=0, ranks=ranks.count, slab=ranks.slab)
        self._ranks = ranks

    def copy_out(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> None:
        assert isinstance(ready, _Point)
        with self._ranks.copying("out", ready.orders, source, target, half):
            super().copy_out(source, target, ready.event, half)

    def copy_in(
        self, source: Sequence[int], target: Sequence[int], ready: Event, half: HalfPass = WHOLE_PASSES
    ) -> tuple[Event, float]:
        assert isinstance(ready, _Point)
        with self._ranks.copying("in", ready.orders, source, target, half):
            return super().copy_in(source, target, ready.event, half)

    def now(self) -> Event:
        return _Point(super().now(), self._ranks.ordered)
