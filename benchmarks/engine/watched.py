"""A model that notes when a resumed session is back in it."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from app.gpu.forward.forward import Runner
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import LayerStack

P = ParamSpec("P")
T = TypeVar("T")


class WatchedStack:
    """A model that, when told to, notes when what runs next has its input on the device: layers, or the head."""

    def __init__(self, stack: LayerStack, device: str) -> None:
        self._stack = stack
        self._device = device
        self._watches = False
        self.ready_at = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._stack, name)

    def watch(self) -> None:
        """What runs next is it. Waits for all that came before: a pause is told of while its pass may still run."""
        synchronize(self._device)
        self._watches = True

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        self._note()
        return self._stack.layer(index, hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        self._note()
        return self._stack.head(hidden)

    def watch_over(self, runner: Runner) -> None:
        """Note also what `runner` runs without calling a layer: programs, and parts of steps that were recorded."""
        runner._run_layers = self._noted(runner._run_layers)
        if runner._graphs is not None:
            runner._graphs.run = self._noted(runner._graphs.run)  # type: ignore[method-assign]

    def _noted(self, run: Callable[P, T]) -> Callable[P, T]:
        def noted(*args: P.args, **kwargs: P.kwargs) -> T:
            self._note()
            return run(*args, **kwargs)

        return noted

    def _note(self) -> None:
        if self._watches:
            synchronize(self._device)
            self.ready_at, self._watches = time.perf_counter(), False


def synchronize(device: str) -> None:
    """Wait for all that the device has been given to do."""
    if device == "cuda":
        torch.cuda.synchronize()
