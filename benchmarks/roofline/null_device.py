"""A device that takes no time: streams, memory and a model whose work is done at once, because there is none.

What stays is the host's part: an engine around it plans, builds inputs, launches, reads results and tells of them.
Tensors are on the CPU and as small as can be, so that an operator on them takes about what its launch would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from app.domain.points import Point, Points
from app.gpu.device.streams import PASSED, WHOLE, CpuStream, Event, Run, Stream
from app.gpu.engine import Engine
from app.gpu.forward.graphs import CudaRecorder
from app.gpu.kernels.attention.base import Batch
from app.gpu.sampling import triton_draw
from app.gpu.startup.loader import build_engine
from app.gpu.startup.weights import LoadedModel
from app.gpu.state.layer_state import LayerState, TokenState
from app.model_store.resolve import resolve
from benchmarks.engine.loading import make_settings

MODEL = "random:tiny-llama"
"""Gives the engine a name and a tokenizer; no weight of it is made."""
LAYERS = 32
VOCABULARY = 8
"""Tokens that one is chosen of: a device does that, and here it is to take no time."""
STEP_TOKENS = 8192
"""Prompts are to end soon."""


class _NotYet:
    """A point that the device seems not to have passed until somebody waits for it. Then it has."""

    def __init__(self) -> None:
        self._passed = False

    def query(self) -> bool:
        return self._passed

    def synchronize(self) -> None:
        self._passed = True


class NullStreams(CpuStream):
    """See `DeviceStreams`: five times the same stream, whose copies are done at once. A `busy` device never has a step
    ready before the host waits for it, so that the host launches the next one meanwhile, as beside a GPU with enough
    to do.
    """

    on_host = False

    def __init__(self, *, busy: bool) -> None:
        self._busy = busy
        self.compute: Stream = self
        self.to_host: Stream = self
        self.to_device: Stream = self
        self.saves: Stream = self
        self.weights: Stream = self
        self.copies = self.events = 0
        self._counts = True

    def forget(self) -> None:
        """Count from 0 again."""
        self.copies = self.events = 0

    def hold(self) -> None:
        """Count nothing any more."""
        self._counts = False

    def record(self) -> Event:
        self.events += self._counts
        return _NotYet() if self._busy else PASSED

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        self.copies += self._counts
        super().copy(target, source, runs)

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8)


class NullStack:
    """See `LayerStack`. It thinks as much of one token as of another."""

    num_layers, hidden_size, kv_heads, head_dim = LAYERS, 1, 1, 1
    states: Sequence[LayerState] = (TokenState(2),) * LAYERS
    vocab_size, parameter_bytes = VOCABULARY, 0
    dtype, device = torch.float32, torch.device("cpu")
    points: Points = MappingProxyType({})

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros(len(token_ids), self.hidden_size)

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        return self.unembed(hidden)

    def unembed(self, normed: Tensor) -> Tensor:
        return torch.ones(len(normed), self.vocab_size)

    def toward(self, token_id: int) -> Tensor:
        return torch.ones(self.hidden_size)

    def written(self, index: int, point: Point, x: Tensor, adapters: Sequence[tuple[Any, Any]]) -> Tensor | None:
        return None


class NullRecorder(CudaRecorder):
    """Runs work when it is recorded. A replay is a call that does nothing."""

    def __init__(self) -> None:
        pass

    def record(self, work: Callable[[], None], *, concurrent: bool = False) -> Callable[[], None]:
        work()
        return lambda: None

    def forget(self) -> None:
        pass


@contextmanager
def null_draws() -> Iterator[None]:
    """Within the block a draw is an operator of PyTorch: Triton's launch, and what it costs the host, is left out."""

    def chosen(probabilities: Tensor, *_rest: object) -> Tensor:
        return probabilities.new_zeros(len(probabilities), dtype=torch.int64)

    with mock.patch.object(triton_draw, "draw", chosen):
        yield


def null_engine(streams: NullStreams, sessions: int, tokens: int) -> Engine:
    """An engine that replays decode steps on such a device, with room for so many sessions of so many tokens. Its
    settings are the server's defaults but for `STEP_TOKENS`.
    """
    settings = make_settings(
        "cpu",
        MODEL,
        kv_device=f"{sessions}x{tokens}",
        kv_host="16MiB",
        max_draft_tokens=0,
        max_step_tokens=STEP_TOKENS,
    )
    loaded = LoadedModel(NullStack(tokens), streams)
    return build_engine(resolve(MODEL, cache_dir=Path()), loaded, settings.engine(), NullRecorder())
