"""What rank 0, which runs the engine, orders of the others. Each has a socket for orders that must keep their turn, and
one for copies each way, which run beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from app.domain.errors import DjinnError
from app.gpu.kernels.attention.base import RowShape
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.state.moves import HalfPass
from app.logs.formats import Log
from app.model_store.resolve import ResolvedModel


@dataclass(frozen=True, slots=True)
class Load:
    """First of all: load a part of the model. Answered by `Loaded` or `NotLoaded`."""

    model: ResolvedModel
    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    products: MatmulPrecision
    attend_in_bfloat16: bool
    batch_invariant: bool
    max_model_len: int
    block_size: int
    kv_dtype: torch.dtype
    threads: int
    """That compute on a CPU."""
    log: Log


@dataclass(frozen=True, slots=True)
class Loaded:
    """The part is loaded, and its kernels are compiled."""


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """It is not. The process ends."""

    error: DjinnError


@dataclass(frozen=True, slots=True)
class Join:
    """Make room for so many blocks of KV in each tier, and meet the others at `store`. Answered by `Loaded`, or
    `NotLoaded` if there is no room. Then other orders follow until the socket closes.
    """

    device_blocks: int
    host_blocks: int
    store: Path


@dataclass(frozen=True, slots=True)
class Run:
    """Run layers `[lo, hi)`. A page with the input is broadcast next."""

    lo: int
    hi: int
    rows: tuple[RowShape, ...]
    decodes: int
    tokens: int
    table_blocks: int
    """Width of the block tables."""


@dataclass(frozen=True, slots=True)
class RunHead:
    """Give logits for so many rows of the residual stream, which are broadcast next."""

    rows: int


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy device blocks, `(source, target)` each, in order."""

    copies: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CopyAcross:
    """Copy blocks between device and host, once `after` orders have been carried out. Answered by None."""

    source: Sequence[int]
    target: Sequence[int]
    after: int
    half: HalfPass


Order = Run | RunHead | CopyBlocks
