"""Modules of Transformers that fold tokens into a state: Mamba, Gated DeltaNet, RWKV, short convolutions.

Such a module asks a cache for the state of its rows, and gives it a new one. Here that cache is filled from the bytes
that the engine keeps for each row (`Batch.states`), and these are replaced by what the module leaves. Rows of one token
run together. Other rows run one by one: a module knows no rows of several lengths.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.gpu.kernels.attention.base import Batch
from app.gpu.state.layer_state import aligned

_CACHES = ("cache_params", "past_key_values", "state")
"""Parameters by which modules take their cache."""
_call = threading.local()
"""Of the layer that this thread runs: its `batch`, and its part of the batch's `states`. Modules run as they are
without one. While several tokens of a row run behind others, also what a selective scan begins from, `scanned`.
"""


@contextmanager
def running(batch: Batch, states: Tensor) -> Iterator[None]:
    """Modules that run meanwhile fold the rows of `batch` into `states`, `[rows, bytes]` uint8."""
    _call.batch, _call.states = batch, states
    try:
        yield
    finally:
        _call.batch = None


class _RowCache:
    """What a module finds of its rows, and leaves. It speaks as Transformers' caches do, of one layer, whichever is
    asked for. Without states no token has come before.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[str, int], Tensor] = {}
        """By kind and number, `[rows, ...]` each."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution. A step of one token changes them in place."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a recurrence remembers. A step of one token may change it in place."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Take new inputs `[rows, channels, tokens]`; returns them behind those that were there, or behind zeros."""
        before = self.states.get(("conv", state_idx))
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            seen = F.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            seen = torch.cat((before, conv_states), dim=-1)
        self.states["conv", state_idx] = seen[..., -size:]
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Take a new state in place of the one before."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's name for it."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Attention that looks for a past here finds none."""
        return key_states, value_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states are to be kept for a way back: the engine does that."""
        return False


class _RowList(list[Tensor]):
    """The same for RWKV, whose modules take tensors `[rows, width, layers]`, each with a place for every layer. A row
    without a past has the model's `initial` ones.
    """

    def __init__(self, initial: list[Tensor], rows: int, layer: int) -> None:
        super().__init__(each.repeat(rows, 1, 1) for each in initial)
        self._layer = layer

    @property
    def states(self) -> dict[tuple[str, int], Tensor]:
        """By number, `[rows, width]` each."""
        return {("list", index): each[..., self._layer] for index, each in enumerate(self)}

    @states.setter
    def states(self, given: dict[tuple[str, int], Tensor]) -> None:
        for (_, index), state in given.items():
            self[index][..., self._layer] = state


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a row's state, and where its bytes begin among those of the layer."""

    key: tuple[str, int]
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Fold:
    """Stands in the place of `forward` of a module that folds, or may."""

    def __init__(self, module: nn.Module, cache_name: str) -> None:
        self._module: Any = module
        self._forward = module.forward
        self._cache_name = cache_name
        self._is_tuple = False
        """Whether the module answers with a tuple that begins with its output."""
        self._parts: list[_Part] = []
        self._initial: list[Tensor] | None = None
        """Of a module that takes a list, which the model makes."""
        self.measuring = True
        """Whether it finds out what the module keeps."""
        self.goes_on = True
        """Whether the module takes several tokens behind others. Some do not look at their state then."""
        self.nbytes = 0
        """Of a row's state."""
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own `forward`."""
        batch: Batch | None = getattr(_call, "batch", None)
        if self.measuring:
            if isinstance(given := kwargs.get(self._cache_name), list):
                self._initial = [each[:1].clone() for each in given]
            cache, before = self._cache(1), self._cache(1).states
            found = self._forward(*args, **{**kwargs, self._cache_name: cache})
            left = cache.states.items()
            self._measure({key: each for key, each in left if key not in before or not torch.equal(each, before[key])})
            self._is_tuple = isinstance(found, tuple)
            return found
        if batch is None:
            return self._forward(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs.pop("hidden_states")
        if len(args) > 1:
            raise ValueError("it calls a module that folds with more than its input")
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None  # it hides padding, and there is none
        pieces, states = list[Tensor](), _call.states
        decodes = batch.decodes if self._initial is None else 0  # RWKV mixes the rows of a step of one token
        if decodes:
            pieces.append(self._run(hidden[0, :decodes, None], states[:decodes], kwargs).transpose(0, 1))
        for row, place in enumerate(batch.rows[decodes:], decodes):
            given, of_row = hidden[:, place.start : place.start + place.length], states[row : row + 1]
            if place.context == place.length:
                pieces.append(self._run(given, of_row, kwargs, begins=True))
            elif self.goes_on:
                pieces.append(self._run(given, of_row, kwargs))
            else:
                pieces += [self._run(token, of_row, kwargs) for token in given.split(1, dim=1)]
        output = torch.cat(pieces, dim=1)
        return (output, None) if self._is_tuple else output

    def _run(self, hidden: Tensor, states: Tensor, kwargs: dict[str, Any], *, begins: bool = False) -> Tensor:
        """Fold tokens `[rows, tokens, hidden_size]` into their rows' states, `[rows, bytes]`; returns the same shape.
        Rows that begin here have none yet.
        """
        rows = len(states)
        cache = self._cache(rows)
        views = {
            part.key: states[:, part.first : part.first + part.nbytes].view(part.dtype).view(rows, *part.shape)
            for part in self._parts
        }
        if not begins:
            cache.states = {key: view.contiguous() for key, view in views.items()}
        _call.scanned = None if begins or hidden.shape[1] == 1 else cache.states.get(("recurrent", 0))
        try:
            found = self._forward(hidden, **{**kwargs, self._cache_name: cache})
        finally:
            _call.scanned = None
        for key, view in views.items():
            view.copy_(cache.states[key])
        output: Tensor = found[0] if self._is_tuple else found
        return output

    @property
    def count(self) -> int:
        """How many numbers a row's state has."""
        return sum(torch.Size(part.shape).numel() for part in self._parts)

    def numbers(self, states: Tensor) -> Tensor:
        """What the bytes of rows' states stand for, float32 `[rows, count]`, one tensor after the other."""
        found = (states[:, part.first : part.first + part.nbytes].view(part.dtype) for part in self._parts)
        return torch.cat([each.float() for each in found], dim=1)

    def _cache(self, rows: int) -> _RowCache | _RowList:
        """Without a past."""
        return _RowCache() if self._initial is None else _RowList(self._initial, rows, self._module.layer_id)

    def _measure(self, left: dict[tuple[str, int], Tensor]) -> None:
        """Find out what the module keeps from what it has `left`."""
        self._parts, self.nbytes = [], 0
        for key, state in left.items():
            part = _Part(key, tuple(state.shape[1:]), state.dtype, self.nbytes)
            self._parts.append(part)
            self.nbytes += aligned(part.nbytes)

    def settle(self, first: int) -> bool:
        """End measuring; returns whether the module folds. Its state begins at byte `first` of the layer's. A module
        that does not fold gets its `forward` back.
        """
        self.measuring = False
        self._parts = [replace(part, first=first + part.first) for part in self._parts]
        if not self._parts:
            self._module.forward = self._forward
        return bool(self._parts)


def _scan_from(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A selective scan of Mamba (Gu and Dao, 2023, equation 2) that goes on from the state of the row that this thread
    runs: `scan` knows none. What it finds is linear in the state that it begins from, so that is added. `scan` takes
    inputs and steps `[rows, channels, tokens]`, A `[channels, state size]`, B and C `[rows, state size, tokens]`.
    """

    @functools.wraps(scan)
    def run(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Any:
        before: Tensor | None = getattr(_call, "scanned", None)
        if before is None:
            return scan(u, dt, a, b, c, **options)
        gate, bias = options.pop("z", None), options.get("delta_bias")
        found, state = scan(u, dt, a, b, c, **{**options, "return_last_state": True})
        steps = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
        steps = F.softplus(steps) if options.get("delta_softplus") else steps
        left = before[:, :, None] * torch.exp(a[None, :, None] * steps.float().cumsum(-1)[..., None])
        found = found + torch.einsum("rdtn,rnt->rdt", left, c.to(left.dtype)).to(found.dtype)
        return found if gate is None else found * F.silu(gate), state + left[:, :, -1].to(state.dtype)

    run.is_ours = True  # type: ignore[attr-defined]
    return run


def settle(folds: Sequence[Fold]) -> list[Fold]:
    """Those of a layer's modules that fold, once the layer has run."""
    found, end = list[Fold](), 0
    for fold in folds:
        if fold.settle(end):
            found.append(fold)
            end += fold.nbytes
    return found


def find_folds(layer: nn.Module) -> list[Fold]:
    """Stand in the place of each module of the layer that may fold. When the layer has run, `settle` tells which do."""
    found = list[Fold]()
    for module in layer.modules():
        names = inspect.signature(module.forward).parameters
        cache_name = next((name for name in _CACHES if name in names), None)
        numbered = hasattr(module, "layer_idx") or hasattr(module, "layer_id")
        if module is not layer and cache_name is not None and numbered:
            found.append(Fold(module, cache_name))
            source = sys.modules[type(module).__module__]
            scan = getattr(source, "mamba_selective_scan", None)
            if scan is not None and not hasattr(scan, "is_ours"):
                source.mamba_selective_scan = _scan_from(scan)  # type: ignore[attr-defined]
    return found
