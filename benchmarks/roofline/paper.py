"""A decode step on paper: the time that bytes, operations and launches take of a device at least.

A kernel takes no less than its bytes at the device's bandwidth, nor than its operations at the device's rate. Kernels
run one after the other, and each launch costs a pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from app.domain.values import SamplingParams
from app.gpu.models.base import LayerStack
from benchmarks.roofline.devices import LAUNCH_S, PROCESSORS, Device
from benchmarks.roofline.launches import Launch, decode_launches
from benchmarks.roofline.traffic import traffic_of

INPUTS, GRAPH, CHOICE = "inputs", "graph", "choice"
"""Parts of a step: copies to what the graph reads, the graph, and the choice of tokens."""
NAMES = {
    "_rotate": "rotate queries and keys",
    "_store": "store keys and values",
    "_attend": "attention",
    "_merge": "merge splits",
    "_add_rms_norm": "add and norm",
    "_silu_mul": "silu and product",
    "_rms_norm": "norm",
    "add_": "add",
}
"""What a reader calls kernels of a layer; others keep their own names."""
PRODUCTS = {
    "_rotate": "qkv product",
    "_add_rms_norm": "output product",
    "_silu_mul": "gate and up product",
    "add_": "down product",
    "copy_": "head product",
}
"""Of the Llama family, by the kernel that follows."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """All launches of one kind in one part of a step: `read` and `written` in bytes."""

    part: str
    name: str
    launches: int
    read: int
    written: int
    flops: int

    @property
    def moved(self) -> int:
        """Bytes."""
        return self.read + self.written

    def bound(self, device: Device) -> Bound:
        """What they take at least, one after the other."""
        memory_s, compute_s = self.moved / device.usable_bytes_per_s, self.flops / device.flops_per_s
        launch_s = self.launches * LAUNCH_S
        return Bound(memory_s, 0.0, launch_s) if memory_s >= compute_s else Bound(0.0, compute_s, launch_s)


@dataclass(frozen=True, slots=True)
class Bound:
    """Seconds of a device: kernels that wait for memory, kernels that compute, launches; and of the host beside it,
    which prepares the next step meanwhile.
    """

    memory_s: float
    compute_s: float
    launch_s: float
    host_s: float = 0.0

    @property
    def device_s(self) -> float:
        """All of the device's."""
        return self.memory_s + self.compute_s + self.launch_s

    @property
    def step_s(self) -> float:
        """No step takes less."""
        return max(self.device_s, self.host_s)

    @property
    def holds(self) -> str:
        """Which bound that is: the host if the device waits for it, else what takes most of the device's time."""
        if self.host_s > self.device_s:
            return "host"
        parts = {"memory": self.memory_s, "compute": self.compute_s, "launches": self.launch_s}
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, slots=True)
class PaperStep:
    """One step of `sessions` rows that see `context` tokens each."""

    model: str
    sessions: int
    context: int
    sampling: str
    kernels: list[Kernel]

    def launches(self, *parts: str) -> int:
        """Of these parts; none: of all."""
        return sum(each.launches for each in self.kernels if not parts or each.part in parts)

    def moved(self, *parts: str) -> int:
        """Bytes read and written by these parts; none: by all."""
        return sum(each.moved for each in self.kernels if not parts or each.part in parts)

    def bound(self, device: Device, host_s: float = 0.0, *parts: str) -> Bound:
        """What these parts take at least (none: all), where the host takes `host_s` of its own."""
        bounds = [each.bound(device) for each in self.kernels if not parts or each.part in parts]
        return Bound(
            sum(each.memory_s for each in bounds),
            sum(each.compute_s for each in bounds),
            sum(each.launch_s for each in bounds),
            host_s,
        )


def paper_step(
    model: str, stack: LayerStack, sessions: int, context: int, sampling: tuple[str, SamplingParams]
) -> PaperStep:
    """The step as our code launches it. `stack` is the model's, from `build_on_meta`; `sampling` has a name."""
    name, params = sampling
    found = decode_launches(stack, sessions, context, PROCESSORS, params)
    parts = ((INPUTS, found.inputs), (GRAPH, found.graph), (CHOICE, found.choice))
    kernels = [kernel for part, launches in parts for kernel in _kinds(part, launches, context)]
    return PaperStep(model, sessions, context, name, kernels)


def _kinds(part: str, launches: Sequence[Launch], context: int) -> Iterator[Kernel]:
    """Launches by their names, in the order in which the first of each comes."""
    found: dict[str, Kernel] = {}
    for launch, following in zip_longest(launches, launches[1:]):
        traffic, name = traffic_of(launch, context), _name(launch, following)
        before = found.get(name, Kernel(part, name, 0, 0, 0, 0))
        found[name] = Kernel(
            part,
            name,
            before.launches + 1,
            before.read + traffic.read,
            before.written + traffic.written,
            before.flops + traffic.flops,
        )
    yield from found.values()


def _name(launch: Launch, following: Launch | None) -> str:
    """A product is named by what its result is for."""
    if launch.kernel == "linear":
        return PRODUCTS.get("" if following is None else following.kernel, "product")
    if launch.kernel == "copy_":
        return "copy logits" if launch.results[0].is_floating_point() else "copy"
    return NAMES.get(launch.kernel, launch.kernel)
