"""A recorder without a device, and a tiny model whose attention on CPU takes padding rows as the one on CUDA does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.gpu.forward.graphs import CudaRecorder
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.kernels.attention.cpu import attend_on_cpu
from app.gpu.models import load_stack
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny

CPU = torch.device("cpu")
POISON = 1
"""For inputs that were not filled again: a token, a block, a position that are there, and somebody else's."""
_WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
_INTEGERS = {torch.int32, torch.int64}


class PaddedAttention:
    """The CPU attention on a batch's real rows. Like `cuda` it stores nothing for padding rows (see `Batch`), gives
    zeros for them, and reads nothing else of a decode row but tensors.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        with _one_kernel():
            return self._attend(query, key, value, kv, batch, spec)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        contexts = batch.contexts[: batch.decodes].numpy()
        padding = np.flatnonzero(contexts == 0)
        assert (batch.slot_blocks.numpy()[padding] == -1).all()
        assert not batch.positions.numpy()[padding].any()
        assert not batch.block_tables[:, :1].numpy()[padding].any()
        if not len(padding):
            return attend_on_cpu(query, key, value, kv, batch, spec)
        real = torch.empty(batch.decodes - len(padding), dtype=torch.int64)
        real.numpy()[:] = np.flatnonzero(contexts)  # as on a device, where nobody on the host knows them
        live = replace(
            batch,
            decodes=len(real),
            positions=batch.positions[real],
            slot_blocks=batch.slot_blocks[real],
            slot_offsets=batch.slot_offsets[real],
            block_tables=batch.block_tables[real],
            contexts=batch.contexts[real],
        )
        output = torch.zeros(query.shape, dtype=query.dtype)
        if len(real):
            output[real] = attend_on_cpu(query[real], key[real], value[real], kv, live, spec)
        return output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Llama whose attention takes padding rows."""
    return with_attention(make_tiny("llama", tmp_path_factory.mktemp("llama")), PaddedAttention())


def with_attention(tiny: TinyModel, attention: Attention) -> TinyModel:
    stack = load_stack(tiny.resolved, device=CPU, dtype=torch.float32, attention=attention)
    return TinyModel(tiny.resolved, stack, tiny.oracle)


class FakeRecorder(CudaRecorder):
    """Repeats work by running it again, and fails a test where a device that repeats kernels would have done otherwise.

    - Work that waits for the device, or takes data from the host, cannot be recorded.
    - Work is rehearsed before it is captured, and what the rehearsal has made is gone then. A replay does what Python
      did in the capture, whatever Python would do now.
    - A replay may touch no tensor from outside that was not there when it was recorded.
    - Results are in tensors from outside; nothing else outlasts a replay.
    - The results of a whole step are gone when its next replay begins, and its inputs, which are integers, are spoilt
      after it. A `concurrent` recording is part of a step: it goes on from the results of another, on the same inputs.
    """

    def __init__(self, wrong: int = 0) -> None:
        """Of the `concurrent` recordings, number `wrong` computes other numbers."""
        self._wrong = wrong
        self.recorded = 0
        """Since it last forgot."""
        self.concurrent = 0
        """Those of them that were recorded while others used the device."""
        self.replays = 0

    def record(self, work: Callable[[], None], *, concurrent: bool = False) -> Callable[[], None]:
        with _Watch() as rehearsal:
            work()
        rehearsal.spoil_own()
        with _Watch() as first:
            work()
        assert first.outputs, "nothing comes out of it"
        first.spoil_own()
        self.recorded += 1
        self.concurrent += concurrent
        errs = concurrent and self.concurrent == self._wrong

        def replay() -> None:
            if not concurrent:
                _fill(first.outputs, float("nan"))
            self.replays += 1
            with _Watch() as again:
                work()
            assert again.operators == first.operators, "a replay would do something else than was captured"
            assert again.outside.keys() <= first.outside.keys(), "a replay reads a tensor that is not a fixed one"
            again.spoil_own()
            for tensor in first.outputs.values() if errs else ():
                tensor.mul_(1.1)
            if not concurrent:
                _fill(first.inputs, POISON)

        return replay

    def forget(self) -> None:
        self.recorded = self.concurrent = 0


class _Watch(TorchDispatchMode):
    """Sees the operators that work consists of, down to those that NumPy and Numba do not hide."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside: dict[int, Tensor] = {}
        """By address: what is read or written and was there before."""
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.operators: list[str] = []
        """By name, in their order; what a kernel consists of may depend on what its tensors hold."""
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = func.name().split(".")[0], _tensors((args, kwargs))
        masks = name == "aten::index" and any(tensor.dtype == torch.bool for tensor in given)
        if name in _WAITS or name == "aten::lift_fresh" or masks:
            raise RuntimeError(f"{name} cannot be recorded")
        if not _in_kernel:
            self.operators.append(name)
        for tensor in given:
            if _address(tensor) not in self._made:
                self.outside[_address(tensor)] = tensor
        if name == "aten::copy_" and _address(args[0]) in self.outside:
            self.outputs[_address(args[0])] = args[0]
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _address(tensor) not in self.outside:
                self._made[_address(tensor)] = tensor  # kept, so that nothing else comes to its address
        return result

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.inputs = {key: tensor for key, tensor in self.outside.items() if tensor.dtype in _INTEGERS}

    def spoil_own(self) -> None:
        """Overwrite what the work has made: its memory is for others now."""
        _fill({key: tensor for key, tensor in self._made.items() if tensor.is_floating_point()}, float("nan"))
        self._made.clear()


_in_kernel: list[str] = []
"""Kernels that are running."""


@contextmanager
def _one_kernel() -> Iterator[None]:
    """What a device does here is one kernel."""
    _in_kernel.append("attention")
    try:
        yield
    finally:
        _in_kernel.pop()


def _tensors(tree: Any) -> list[Tensor]:
    """All but weights in oneDNN's own layout, which have no address."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fill(tensors: Mapping[int, Tensor], value: float) -> None:
    """Overwrite the tensors with all that shares their memory."""
    for tensor in tensors.values():
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        whole.fill_(value)
