"""A rank that follows: it has a part of each layer and of each KV block, and does what rank 0 orders.

Ranks exchange orders over sockets, one for those that keep their turn and one for copies each way; and between their
devices, over Gloo or NCCL, the input of a run and the sums of its layers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from app.domain.errors import DjinnError
from app.gpu.device.hardware import allocating, dtype_name
from app.gpu.device.streams import streams_of
from app.gpu.forward.graphs import layer_by_layer
from app.gpu.kernels.attention.base import Batch, RowShape, make_batch
from app.gpu.kernels.linear.base import Shard
from app.gpu.kv.pools import KVPool, SharedHostPool
from app.gpu.models.base import LayerStack
from app.gpu.models.recipe import Recipe
from app.gpu.state.kv_header import KVLayout
from app.gpu.state.layer_state import divide
from app.logs import Log, configure

logger = logging.getLogger(__name__)

_DIST: Any = torch.distributed  # annotated only in part

PATIENCE = timedelta(days=365)
"""A peer that ends closes its connections, and one that hangs is for who watches the engine."""
LOOPBACK = "lo"
"""Where ranks meet: by themselves the libraries would listen where the machine's name leads."""
_ALIGNMENT = 64
"""Bytes: kernels read vectors."""


@dataclass(frozen=True, slots=True)
class Load:
    """The first message to a rank: load a part of the model. It answers None, or what is wrong: then it ends.

    The second message is `(device_blocks, host_blocks, store)`: make room for so many blocks of KV in each tier, answer
    in the same way, and meet the others at the file `store`. Then orders follow: a method of `Follower`, its arguments.
    """

    recipe: Recipe
    rank: int
    ranks: int
    threads: int
    """That compute on a CPU."""
    log: Log


@dataclass(frozen=True, slots=True)
class Run:
    """An order to run layers `[lo, hi)`. A page, uint8, is broadcast next: the residual stream and the batch."""

    lo: int
    hi: int
    rows: tuple[RowShape, ...]
    decodes: int
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """The shape and dtype of each in the page."""

    @staticmethod
    def of(lo: int, hi: int, hidden: Tensor, batch: Batch) -> tuple[Run, Tensor]:
        """The run of this input, and the page, on the device of `hidden`."""
        given = [hidden, batch.positions, batch.slot_blocks, batch.slot_offsets, batch.block_tables, batch.contexts]
        given += [] if batch.prompt_starts is None else [batch.prompt_starts]
        given += [tensor for group in batch.others for tensor in group]
        run = Run(lo, hi, batch.rows, batch.decodes, tuple((tuple(each.shape), each.dtype) for each in given))
        page = run.empty(hidden.device)
        for place, tensor in zip(run._views(page), given, strict=True):
            place.copy_(tensor)
        return run, page

    def unpack(self, page: Tensor) -> tuple[Tensor, Batch]:
        """The residual stream and the batch of `page`, as views of it."""
        hidden, *tensors = self._views(page)
        end = 5 + (len(self.rows) > self.decodes)
        groups = iter(tensors[end:])
        batch = Batch(self.rows, self.decodes, *tensors[:end])
        return hidden, replace(batch, others=tuple(zip(groups, groups, strict=True)))

    def empty(self, device: torch.device) -> Tensor:
        """A page for the same run, uninitialised."""
        return torch.empty(sum(map(_page_bytes, self.tensors)), dtype=torch.uint8, device=device)

    def _views(self, page: Tensor) -> list[Tensor]:
        parts = page.split(list(map(_page_bytes, self.tensors)))
        return [
            part.view(dtype)[: prod(shape)].view(shape)
            for part, (shape, dtype) in zip(parts, self.tensors, strict=True)
        ]


def _page_bytes(tensor: tuple[tuple[int, ...], torch.dtype]) -> int:
    """Of a tensor of this shape and dtype, with what aligns the next."""
    shape, dtype = tensor
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


class Group:
    """This process among others of the machine, each with a device. All call the same methods in the same order."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks = rank, ranks
        self._device = device
        self._joined: Any = None

    def join(self, store: Path) -> None:
        """Connect with all the others, who meet at the file `store`. Returns when all have come; then it may go."""
        if self._device.type == "cpu":
            kind, options = _DIST.ProcessGroupGloo, _DIST.ProcessGroupGloo._Options()
            options._devices = [kind.create_device(interface=LOOPBACK)]
        else:
            kind, options = _DIST.ProcessGroupNCCL, _DIST.ProcessGroupNCCL.Options()
            os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
        options._timeout = PATIENCE
        self._joined = kind(_DIST.FileStore(str(store), self.ranks), self.rank, self.ranks, options)
        self.total(torch.ones(1, 1, device=self._device))  # connections are made by the first call

    def broadcast(self, page: Tensor) -> None:
        """Give `page`, dense, of rank 0 to all others, who have one of its size."""
        options = _DIST.BroadcastOptions()
        options.rootRank = 0
        self._joined.broadcast([page], options).wait()

    def total(self, part: Tensor) -> Tensor:
        """The sum of what each rank has, `[tokens, features]`, dense. Parts are added in the order of ranks in float32
        and rounded once: a row's bits depend neither on its company nor on who comes first. Before `join` it is the
        part itself: work that no rank reads needs no others.
        """
        if self._joined is None:
            return part
        parts = torch.empty((self.ranks * len(part), *part.shape[1:]), dtype=part.dtype, device=part.device)
        self._joined._allgather_base(parts, part).wait()
        first, *others = parts.chunk(self.ranks)
        total = first.float()
        for each in others:
            total.add_(each)
        return total.to(part.dtype)

    def beside(self, part: Tensor, width: int) -> Tensor:
        """Rank 0 gets what all have, `[rows, width]`, from the columns of each, which are as many, but for the last.
        The others get their own part back. Before `join` all ranks get that, with zeros next to it.
        """
        rows, columns = len(part), -(-width // self.ranks)
        if self._joined is None:
            return torch.nn.functional.pad(part, (0, width - part.shape[1]))
        padded = torch.nn.functional.pad(part, (0, columns - part.shape[1]))
        options = _DIST.GatherOptions()
        options.rootRank = 0
        parts = part.new_empty(self.ranks if self.rank == 0 else 0, rows, columns)
        self._joined.gather([list(parts)] if self.rank == 0 else [], [padded], options).wait()
        return parts.transpose(0, 1).reshape(rows, -1)[:, :width].contiguous() if self.rank == 0 else part

    def leave(self) -> None:
        """Close all connections."""
        self._joined = None


@contextmanager
def ending_with_it() -> Iterator[None]:
    """End the process when what is within ends, whatever other threads do: with 0 if rank 0 has closed a socket."""
    status = 1
    try:
        yield
    except (EOFError, ConnectionError):
        status = 0
    except BaseException:
        logger.exception("a rank has failed")
    finally:
        os._exit(status)


@ending_with_it()
def follow(orders: Connection, copies: tuple[Connection, Connection], slab: int) -> None:
    """Serve rank 0 until it closes the sockets, then end the process. `copies` are those out and in."""
    load: Load = orders.recv()
    recipe = load.recipe
    configure(load.log)
    torch.set_num_threads(load.threads)
    if recipe.device.type == "cuda":
        torch.cuda.set_device(recipe.device)
    group = Group(load.rank, load.ranks, recipe.device)
    store: Path
    try:
        stack = recipe.load_stack(Shard(load.rank, load.ranks, group.total, group.beside))
        with torch.inference_mode():
            _warm_up(stack, load)
        orders.send(None)
        device_blocks, host_blocks, store = orders.recv()
        follower = Follower(load, stack, group, slab, device_blocks, host_blocks)
    except DjinnError as error:
        orders.send(error)
        return
    orders.send(None)
    group.join(store)
    for connection, out in zip(copies, (True, False), strict=True):
        given = (connection, out)
        threading.Thread(target=follower.serve_copies, args=given, name="djinn-copy", daemon=True).start()
    with torch.inference_mode():
        while True:
            follower.carry_out(*orders.recv())


def _warm_up(stack: LayerStack, load: Load) -> None:
    """Compile what a decode row needs, alone and beside a prompt."""
    recipe, block_size = load.recipe, load.recipe.settings.block_size
    both = make_batch([(0, 1), (0, block_size)], [[0], [1]], block_size, recipe.device)
    pool = KVPool(stack, 2, block_size, dtype=recipe.kv_dtype).layer(0)
    for batch in (both, make_batch([(0, 1)], [[0]], block_size, recipe.device)):
        hidden = torch.zeros(len(batch.positions), stack.hidden_size, dtype=recipe.dtype, device=recipe.device)
        stack.head(stack.layer(0, hidden, batch, pool))


class Follower:
    """Carries out orders. The main thread takes those that keep their turn, one thread each way copies."""

    def __init__(
        self, load: Load, stack: LayerStack, group: Group, slab: int, device_blocks: int, host_blocks: int
    ) -> None:
        """Raises FieldOutOfRange if there is no room for the blocks of KV."""
        recipe, block_size = load.recipe, load.recipe.settings.block_size
        self._group, self._stack, self._device = group, stack, recipe.device
        kept = dtype_name(recipe.kv_dtype)
        layout = KVLayout(divide(stack.states).layers, stack.kv_heads, block_size, stack.head_dim, kept)
        with allocating("kv_device", device_blocks * layout.block_bytes):
            self._pool = KVPool(stack, device_blocks, block_size, dtype=recipe.kv_dtype)
        streams, rank, ranks = streams_of(recipe.device), load.rank, load.ranks
        self._host = SharedHostPool(self._pool, host_blocks, streams, rank=rank, ranks=ranks, slab=slab)
        self._run_layers = layer_by_layer(stack, self._pool)
        self._done = 0
        self._came = threading.Condition()

    def carry_out(self, order: str, arguments: tuple[Any, ...]) -> None:
        """Do what keeps its turn: one of the next three methods."""
        getattr(self, order)(*arguments)
        with self._came:
            self._done += 1
            self._came.notify_all()

    def run(self, run: Run) -> None:
        """Run this rank's part of layers."""
        page = run.empty(self._device)
        self._group.broadcast(page)
        self._run_layers(run.lo, run.hi, *run.unpack(page))

    def head(self, rows: int) -> None:
        """Give logits for so many rows of the residual stream, which are broadcast next."""
        hidden = torch.empty(rows, self._stack.hidden_size, dtype=self._stack.dtype, device=self._device)
        self._group.broadcast(hidden)
        self._stack.head(hidden)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks, `(source, target)` each, in order."""
        self._pool.copy_blocks(copies)

    @ending_with_it()
    def serve_copies(self, connection: Connection, out: bool) -> None:
        """Copy blocks from the device to the host, or to it, each time once so many orders have been carried out."""
        copy = self._host.copy_out if out else self._host.copy_in
        while True:
            orders, source, target, half = connection.recv()
            self._wait(orders)
            copy(source, target, self._host.now(), half)
            connection.send(None)

    def _wait(self, orders: int) -> None:
        with self._came:
            self._came.wait_for(lambda: self._done >= orders)
