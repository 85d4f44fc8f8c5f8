"""A rank that follows: it has a part of each layer and of each KV block, and does what rank 0 orders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection

import torch

from app.domain.errors import DjinnError
from app.gpu.device.choice import dtype_name
from app.gpu.device.group import Group
from app.gpu.device.memory import allocating
from app.gpu.device.streams import streams_of
from app.gpu.forward.pieces import layer_by_layer
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kernels.linear.shard import Shard
from app.gpu.kv.pools import KVPool, Part, SharedHostPool
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.ranks.orders import CopyAcross, CopyBlocks, Join, Load, Order, Page, Run, RunHead
from app.gpu.state.kv_header import KVLayout
from app.logs.formats import configure

logger = logging.getLogger(__name__)

Copy = Callable[[CopyAcross], None]
Ending = Callable[[], AbstractContextManager[None]]


def follow(orders: Connection, copies: tuple[Connection, Connection], slab: int, ending_with_it: Ending) -> None:
    """Serve rank 0 until it closes the sockets, which raises `EOFError`. `copies` are those out and in, and the process
    ends with the first thread that leaves `ending_with_it`.
    """
    load: Load = orders.recv()
    configure(load.log)
    torch.set_num_threads(load.threads)
    if load.device.type == "cuda":
        torch.cuda.set_device(load.device)
    group = Group(load.rank, load.ranks, load.device)
    try:
        stack = load_part(load, group)
        orders.send(None)
        join: Join = orders.recv()
        follower = Follower(load, stack, group, join, slab)
    except DjinnError as error:
        orders.send(error)
        return
    orders.send(None)
    group.join(join.store)
    for connection, copy in zip(copies, (follower.copy_out, follower.copy_in), strict=True):
        given = (connection, copy, ending_with_it)
        threading.Thread(target=_serve_copies, args=given, name="djinn-copy", daemon=True).start()
    with torch.inference_mode():
        while True:
            follower.carry_out(orders.recv())


def load_part(load: Load, group: Group) -> LayerStack:
    """The part of the model that is this rank's. A layer and the head have run once."""
    stack = load_stack(
        load.model,
        device=load.device,
        dtype=load.dtype,
        attention=attention_for(load.device, batch_invariant=load.batch_invariant, in_bfloat16=load.attend_in_bfloat16),
        max_model_len=load.max_model_len,
        batch_invariant=load.batch_invariant,
        products=load.products,
        shard=Shard(load.rank, load.ranks, group.total, group.beside),
    )
    with torch.inference_mode():
        _warm_up(stack, load)
    return stack


def _warm_up(stack: LayerStack, load: Load) -> None:
    """Compile what a decode row needs, alone and beside a prompt."""
    both = make_batch([(0, 1), (0, load.block_size)], [[0], [1]], load.block_size, load.device)
    pool = KVPool(stack, 2, load.block_size, dtype=load.kv_dtype).layer(0)
    for batch in (both, make_batch([(0, 1)], [[0]], load.block_size, load.device)):
        hidden = torch.zeros(len(batch.positions), stack.hidden_size, dtype=load.dtype, device=load.device)
        stack.head(stack.layer(0, hidden, batch, pool))


class Follower:
    """Carries out orders. The main thread takes those that keep their turn, one thread each way copies."""

    def __init__(self, load: Load, stack: LayerStack, group: Group, join: Join, slab: int) -> None:
        """Raises FieldOutOfRange if there is no room for the blocks of KV."""
        self._group, self._stack, self._device = group, stack, load.device
        kept = dtype_name(load.kv_dtype)
        layout = KVLayout(stack.num_layers, stack.kv_heads, load.block_size, stack.head_dim, kept)
        with allocating("kv_device", join.device_blocks * layout.block_bytes):
            self._pool = KVPool(stack, join.device_blocks, load.block_size, dtype=load.kv_dtype)
        part = Part(load.rank, load.ranks, slab)
        self._host = SharedHostPool(self._pool, join.host_blocks, streams_of(load.device), part)
        self._run_layers = layer_by_layer(stack, self._pool)
        self._done = 0
        self._came = threading.Condition()

    def carry_out(self, order: Order) -> None:
        """Do what keeps its turn."""
        match order:
            case Run():
                self._run(order)
            case RunHead(rows):
                hidden = torch.empty(rows, self._stack.hidden_size, dtype=self._stack.dtype, device=self._device)
                self._group.broadcast(hidden)
                self._stack.head(hidden)
            case CopyBlocks(copies):
                self._pool.copy_blocks(copies)
        with self._came:
            self._done += 1
            self._came.notify_all()

    def copy_out(self, copy: CopyAcross) -> None:
        """Copy device blocks to the host."""
        self._wait(copy.after)
        self._host.copy_out(copy.source, copy.target, self._host.now(), copy.half)

    def copy_in(self, copy: CopyAcross) -> None:
        """Copy host blocks to the device."""
        self._wait(copy.after)
        self._host.copy_in(copy.source, copy.target, self._host.now(), copy.half)

    def _run(self, run: Run) -> None:
        page = Page(run, self._stack.hidden_size, self._stack.dtype)
        given = page.empty(self._device)
        self._group.broadcast(given)
        hidden, batch = page.unpack(given)
        self._run_layers(run.lo, run.hi, hidden, batch)

    def _wait(self, orders: int) -> None:
        """Until so many orders have been carried out."""
        with self._came:
            self._came.wait_for(lambda: self._done >= orders)


def _serve_copies(connection: Connection, copy: Copy, ending_with_it: Ending) -> None:
    with ending_with_it():
        while True:
            copy(connection.recv())
            connection.send(None)
