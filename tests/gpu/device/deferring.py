"""A device that has not done what it was given: a CPU whose work waits in streams until a random choice runs it.

PyTorch operations on its tensors, the model's layers and every copy are queued, and run one at a time, in any order
that the events allow. Reading a result without having waited for it reads what was there before.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from app.gpu.device.streams import PASSED, WHOLE, CpuStreams, Event, Run, Stream
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack
from app.gpu.state.checkpoints import InParts

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.masked_select.default}
"""Operations that a GPU answers to the host, or whose result has a shape that only the data tell."""

UNINITIALISED = {aten.empty.memory_format, aten.empty_strided.default}


class DeferredEvent:
    """See `Event`."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.passed = False

    def query(self) -> bool:
        self._device.run_some()
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            self._device.run_one()


class DeferredStream:
    """See `Stream`."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.queue: deque[Callable[[], object] | DeferredEvent] = deque()

    def record(self) -> Event:
        event = DeferredEvent(self._device)

        def pass_by() -> None:
            event.passed = True

        self.add(pass_by)
        return event

    def wait(self, event: Event) -> None:
        if event is not PASSED:
            assert isinstance(event, DeferredEvent)
            self.queue.append(event)

    def copy(self, target: Tensor, source: Tensor, runs: Iterable[Run] = WHOLE) -> None:
        def run() -> None:
            for write, read in runs:
                target[write].copy_(source[read])

        self.add(run)

    def add(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self._device.run_some()

    def is_ready(self) -> bool:
        """Whether its next piece of work may run."""
        while self.queue and isinstance(self.queue[0], DeferredEvent) and self.queue[0].passed:
            self.queue.popleft()
        return bool(self.queue) and not isinstance(self.queue[0], DeferredEvent)


class DeferredDevice(TorchDispatchMode):
    """See the module. It is also `DeviceStreams`. Its operations are deferred while it is entered."""

    on_host = False

    def __init__(self, seed: int, late: str | None = None) -> None:
        """`late` is the stream that runs only when all others have nothing to do, or wait for it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = random.Random(seed)
        self._streams = [DeferredStream(self) for _ in range(5)]
        self._compute = self._streams[0]
        self.compute: Stream
        self.to_host: Stream
        self.to_device: Stream
        self.saves: Stream
        self.weights: Stream
        self.compute, self.to_host, self.to_device, self.saves, self.weights = self._streams
        self._late = None if late is None else getattr(self, late)
        self._idle = self._random.choice([0.0, 0.1, 0.5])
        """How much the device does that nobody waits for."""
        self._running = False
        self._own: dict[int, Tensor] = {}
        """The device's memory by its address. It is kept, so that no address is used twice."""

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made: Tensor = self._immediately(lambda: _poisoned(torch.empty(shape, dtype=dtype)))
        return made

    def host_slab(self, shape: tuple[int, ...]) -> Tensor:
        return CpuStreams().host_slab(shape)

    def adopt(self, tensor: Tensor) -> Tensor:
        self._own[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def launch(self, shape: tuple[int, ...], dtype: torch.dtype, work: Callable[[], Tensor]) -> Tensor:
        """A tensor that will be what `work` returns."""
        result = self._immediately(lambda: _poisoned(torch.empty(shape, dtype=dtype)))
        self._compute.add(lambda: result.copy_(work()))
        return self.adopt(result)

    def deferred_draw(self, draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same for rows of probabilities that are the device's."""

        def launch(probabilities: Tensor, *rest: Any) -> Tensor:
            return self.launch((len(probabilities),), torch.int64, lambda: draw(probabilities, *rest))

        return launch

    def run_some(self) -> None:
        while not self._running and self._random.random() < self._idle and self._ready() not in ([], [self._late]):
            self.run_one()

    def run_one(self) -> None:
        ready = self._ready()
        if not ready:
            raise AssertionError("an event is waited for that no stream will pass")
        stream = self._random.choice([each for each in ready if each is not self._late] or ready)
        work = stream.queue.popleft()
        assert not isinstance(work, DeferredEvent)
        with torch.inference_mode():
            self._immediately(work)

    def finish(self) -> None:
        while self._ready():
            self.run_one()

    def _ready(self) -> list[DeferredStream]:
        return [stream for stream in self._streams if stream.is_ready()]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._running:
            return func(*args, **kwargs)
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        mine = [each for each in tensors if each.untyped_storage().data_ptr() in self._own]
        if not tensors:  # host memory comes from `host_tensor`
            made = func(*args, **kwargs)
            return self.adopt(_poisoned(made) if func in UNINITIALISED else made)
        if not mine:
            return func(*args, **kwargs)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.is_view:
            return func(*args, **kwargs)
        if func in WAITS or any(each.dim() for each in tensors if not any(each is own for own in mine)):
            raise AssertionError(f"{func} waits for the device, or reads memory of the other side")
        return self._defer(func, args, kwargs)

    def _defer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:
            self._compute.add(lambda: func(*args, **kwargs))
            return args[0]
        shapes = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        results = tree_map(lambda like: self._immediately(lambda: self.adopt(_poisoned(_like(like)))), shapes)

        def run() -> None:
            found = func(*args, **kwargs)
            for result, value in zip(tree_flatten(results)[0], tree_flatten(found)[0], strict=True):
                result.copy_(value)

        self._compute.add(run)
        return results

    def _immediately(self, work: Callable[[], Any]) -> Any:
        before, self._running = self._running, True
        try:
            return work()
        finally:
            self._running = before


class DeferredStack:
    """A model whose work is done when its device comes to it."""

    def __init__(self, stack: LayerStack, device: DeferredDevice) -> None:
        self._stack, self._deferred = stack, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stack, name)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        shape = (len(token_ids), self._stack.hidden_size)
        return self._deferred.launch(shape, self._stack.dtype, lambda: self._stack.embed(token_ids, positions))

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        run = lambda: self._stack.layer(index, hidden, batch, kv)  # noqa: E731
        return self._deferred.launch(tuple(hidden.shape), self._stack.dtype, run)

    def head(self, hidden: Tensor) -> Tensor:
        shape = (len(hidden), self._stack.vocab_size)
        return self._deferred.launch(shape, torch.float32, lambda: self._stack.head(hidden))

    def head_in_parts(self, hidden: Tensor) -> InParts[Tensor]:
        yield None
        return self.head(hidden)


def _like(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _poisoned(tensor: Tensor) -> Tensor:
    """Memory that nobody has written yet, so that nobody takes what he finds there for a result."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.zero_()


def _as_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
