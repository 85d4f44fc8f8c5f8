"""What the processes of one model tell each other's devices: Gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_DIST: Any = torch.distributed  # annotated only in part

PATIENCE = timedelta(days=365)
"""A peer that ends closes its connections, and one that hangs is for who watches the engine."""
LOOPBACK = "lo"
"""Where ranks meet: by themselves the libraries would listen where the machine's name leads."""


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
