"""What ranks exchange: orders over sockets, one for those that keep their turn and one for copies each way; and between
their devices, over Gloo or NCCL, the input of a run and the sums of its layers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from app.gpu.kernels.attention.base import Batch, RowShape
from app.gpu.models.recipe import Recipe
from app.logs import Log

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
    """An order to run layers `[lo, hi)`. A page with the input, uint8, is broadcast next: the residual stream, and each
    tensor of the batch.
    """

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
        run = Run(lo, hi, batch.rows, batch.decodes, tuple((tuple(each.shape), each.dtype) for each in given))
        page = run.empty(hidden.device)
        for place, tensor in zip(run._views(page), given, strict=True):
            place.copy_(tensor)
        return run, page

    def unpack(self, page: Tensor) -> tuple[Tensor, Batch]:
        """The residual stream and the batch of `page`, as views of it."""
        hidden, *tensors = self._views(page)
        return hidden, Batch(self.rows, self.decodes, *tensors)

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
        meeting = _DIST.FileStore(str(store), self.ranks)
        make = _gloo if self._device.type == "cpu" else _nccl
        self._joined = make(meeting, self.rank, self.ranks)
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


def _gloo(store: Any, rank: int, ranks: int) -> Any:
    options = _DIST.ProcessGroupGloo._Options()
    options._devices = [_DIST.ProcessGroupGloo.create_device(interface=LOOPBACK)]
    options._timeout = PATIENCE
    return _DIST.ProcessGroupGloo(store, rank, ranks, options)


def _nccl(store: Any, rank: int, ranks: int) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    options = _DIST.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return _DIST.ProcessGroupNCCL(store, rank, ranks, options)
