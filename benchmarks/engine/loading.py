"""Engines as `djinn serve` makes them, and a model that notes when a resumed session is back in it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PretrainedConfig

from app.gpu.device.hardware import choose_device, choose_dtype
from app.gpu.device.streams import streams_of
from app.gpu.engine import Engine
from app.gpu.forward.forward import Runner
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.attention.base import Batch
from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.gpu.startup.loader import build_engine, load_engine
from app.gpu.startup.weights import LoadedModel
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import Settings
from benchmarks.engine.live import LiveEngine

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


FEW = 4
"""Most sessions in one step where no more take part: an engine prepares for as many as it is told when it is loaded."""

TRACED_ROWS = 10


class Place(Protocol):
    """Where an engine runs, and where its work is traced to, if it is."""

    @property
    def device(self) -> str: ...

    @property
    def trace(self) -> Path | None: ...


@dataclass(frozen=True, slots=True)
class OnCpu:
    """A `Place`: a CPU, without a trace."""

    device: str = "cpu"
    trace: Path | None = None


def make_settings(device: str, model: str, **changed: object) -> Settings:
    """The server's defaults but for `changed`, and without a state folder."""
    return Settings.model_validate({"model": model, "device": device, "state_dir": None, **changed})


def find_model(name: str) -> ResolvedModel:
    """A folder, or a model with random weights: neither needs a cache."""
    return resolve(name, cache_dir=Path())


def transformers_config(model: ResolvedModel) -> PretrainedConfig:
    """That of the model as Transformers' own modules are made with it: a shape's has no more than Djinn reads."""
    found: Any = model.config
    config: PretrainedConfig = found if isinstance(found, PretrainedConfig) else AutoConfig.for_model(**found.to_dict())
    return config


def load(place: Place, model: str, **changed: object) -> LiveEngine:
    """Load a model and put an engine around it. Raises `DjinnError` if the machine has no room for it."""
    settings = make_settings(place.device, model, **changed)
    return live(place, load_engine(find_model(model), settings.engine()))


def load_layers(place: Place, model: str, dtype: str = "auto") -> LayerStack:
    """The model alone, to build several engines around it."""
    device = choose_device(place.device)
    return load_stack(
        find_model(model), device=device, dtype=choose_dtype(dtype, device), attention=attention_for(device)
    )


def build(place: Place, model: str, stack: object, **changed: object) -> LiveEngine:
    """An engine around a loaded model: a `LayerStack`, or something that stands before one."""
    settings = make_settings(place.device, model, **changed)
    layers = cast("LayerStack", stack)
    loaded = LoadedModel(layers, streams_of(layers.device))
    engine = build_engine(find_model(model), loaded, settings.engine())
    if isinstance(stack, WatchedStack):
        stack.watch_over(engine._runner)
    return live(place, engine)


def live(place: Place, engine: Engine) -> LiveEngine:
    """The engine, traced if that is asked for."""
    return LiveEngine(engine, None if place.trace is None else traced(place.trace, place.device))


@contextmanager
def traced(trace: Path, device: str) -> Iterator[None]:
    """Writes `trace` (`.json.gz`), which chrome://tracing and Perfetto read, and beside it the ten operators that took
    the longest, as `.txt`. Operators are seen on the thread that enters the block, kernels wherever they come from.
    """
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        yield
    found.export_chrome_trace(str(trace))
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=TRACED_ROWS)
    trace.with_name(trace.name.removesuffix(".json.gz") + ".txt").write_text(table)
