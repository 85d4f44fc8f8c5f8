"""What the CUDA path launches in a decode step, seen without a GPU.

The code that is served runs on PyTorch's `meta` device, whose tensors have shapes and no memory. Operators that a GPU
runs as one kernel are noted, and so is each launch of a Triton kernel, which is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from app.domain.values import SamplingParams
from app.gpu.device.streams import put_each
from app.gpu.forward.graphs import Graphs, layer_by_layer
from app.gpu.kernels.attention import attention_for, triton_paged
from app.gpu.kernels.attention.base import make_batch
from app.gpu.kv.pools import KVPool
from app.gpu.models import build_stack
from app.gpu.models.base import LayerStack
from app.gpu.sampling import SampleRequest
from app.gpu.sampling.sampler import choose, place_requests
from app.gpu.weights.bundles import ResidentWeights
from app.gpu.weights.checkpoint import weights_of
from app.model_store.resolve import resolve
from benchmarks.roofline.null_device import NullRecorder

META, CUDA = torch.device("meta"), torch.device("cuda")
DTYPE = torch.bfloat16
BLOCK_SIZE = 16
"""The server's default."""
aten = torch.ops.aten
_ONE_KERNEL = {aten.linear.default, aten.rms_norm.default}
"""Operators that are made of others wherever they have no kernel of their own. On CUDA they have one."""
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: its arguments by their names, and what it returns, on `meta`. Triton's return nothing."""

    kernel: str
    arguments: dict[str, Any]
    results: tuple[Tensor, ...] = ()


class LaunchLog(TorchDispatchMode):
    """Notes launches while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: list[Launch] = []

    def take(self) -> list[Launch]:
        """Those since the last call."""
        found, self._found = self._found, []
        return found

    def launcher(self, kernel: Any, grid: object) -> Callable[..., None]:
        """What Triton's `kernel[grid]` is."""

        def launch(*args: Any, **kwargs: Any) -> None:
            self._found.append(Launch(kernel.fn.__name__, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

        return launch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler to keep it out of the mode, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ONE_KERNEL:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if func not in _ALLOCATIONS and not func.is_view:
            named = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
            results = tuple(each for each in tree_leaves(result) if isinstance(each, Tensor))
            self._found.append(Launch(func._schema.name.removeprefix("aten::"), named | kwargs, results))
        return result


@contextmanager
def noting_launches(processors: int) -> Iterator[LaunchLog]:
    """Launches on this thread are noted within the block, for a device of so many multiprocessors."""
    log = LaunchLog()
    with (
        torch.inference_mode(),
        mock.patch.object(KernelInterface, "__getitem__", lambda kernel, grid: log.launcher(kernel, grid)),
        mock.patch.object(triton_paged, "_processors", return_value=processors),
        log,
    ):
        yield log


def build_on_meta(model: str) -> LayerStack:
    """The model of that shape as it is built for CUDA, in bfloat16, without memory."""
    found = resolve(f"random:{model}", cache_dir=Path())
    weights = ResidentWeights(CUDA, DTYPE, batch_invariant=False)  # chooses the layers
    weights.device = META
    source = weights_of(found, CUDA, DTYPE, on_meta=True)
    return build_stack(found, source, weights, attention_for(CUDA), None)


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """Kernels of a decode step: copies to the graph's inputs, the graph's own, and those that choose the tokens."""

    inputs: list[Launch]
    graph: list[Launch]
    choice: list[Launch]

    @property
    def all(self) -> list[Launch]:
        """In their order."""
        return [*self.inputs, *self.graph, *self.choice]


def decode_launches(
    stack: LayerStack, sessions: int, context: int, processors: int, sampling: SamplingParams
) -> StepLaunches:
    """What a step launches in which so many sessions decode, each of `context` tokens, all sampled alike."""
    blocks = [range(-(-context // BLOCK_SIZE))] * sessions
    batch = make_batch([(context - 1, 1)] * sessions, blocks, BLOCK_SIZE, META)
    request = SampleRequest(sampling, frozenset(), context)
    choices = place_requests([request] * sessions, stack.vocab_size, put_each(META))
    with torch.inference_mode():
        token_ids = torch.empty(sessions, dtype=torch.int64, device=META)
        pool, width = KVPool(stack, 1, BLOCK_SIZE), -(-stack.max_model_len // BLOCK_SIZE)
        graphs = Graphs(stack, layer_by_layer(stack, pool), NullRecorder(), sessions, width, pool.groups)
    with noting_launches(processors) as log:
        graphs.record_whole(sessions)
        graph = log.take()
        logits = graphs.replay_whole(token_ids, batch)
        inputs = log.take()
        choose(logits, choices, on_host=False)
        return StepLaunches(inputs, graph, log.take())
