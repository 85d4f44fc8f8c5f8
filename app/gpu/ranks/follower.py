"""A rank that follows: it has a part of each layer and of each KV block, and does what rank 0 orders."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from app.domain.errors import DjinnError
from app.gpu.device.hardware import allocating, dtype_name
from app.gpu.device.streams import streams_of
from app.gpu.forward.graphs import layer_by_layer
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kernels.linear.base import Shard
from app.gpu.kv.pools import KVPool, Part, SharedHostPool
from app.gpu.models.base import LayerStack
from app.gpu.ranks.protocol import Group, Load, Run
from app.gpu.state.kv_header import KVLayout
from app.logs import configure

logger = logging.getLogger(__name__)


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
        layout = KVLayout(stack.num_layers, stack.kv_heads, block_size, stack.head_dim, kept)
        with allocating("kv_device", device_blocks * layout.block_bytes):
            self._pool = KVPool(stack, device_blocks, block_size, dtype=recipe.kv_dtype)
        part = Part(load.rank, load.ranks, slab)
        self._host = SharedHostPool(self._pool, host_blocks, streams_of(recipe.device), part)
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
