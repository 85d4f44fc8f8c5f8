"""What this machine copies at best: between pinned host memory and the device, and within the device's memory."""

import time
from collections.abc import Callable
from statistics import median

import torch

from benchmarks.gpu_check.context import SkipStage, StageContext
from benchmarks.gpu_check.plan import MIB, CopyPlan
from loadgen.report.figures import Spread

LEAST_BYTES = 256 << 20
"""Under one reading of the clock: a small copy is made so often."""


class PlainCopies:
    """Buffers of `size` bytes for each way, pinned where the device is a GPU, all written once."""

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self._cuda = device == "cuda"
        self._host = torch.ones(2, size, dtype=torch.uint8, pin_memory=self._cuda)
        self._device = torch.ones(2, size, dtype=torch.uint8, device=device)
        self._streams = [torch.cuda.Stream() for _ in range(2)] if self._cuda else []

    def to_device(self, times: int = 1) -> float:
        """Bytes a second, in GB, of copies of which the last has arrived."""
        return times * self.size / self._timed(lambda: self._queue(0, times)) / 1e9

    def to_host(self, times: int = 1) -> float:
        return times * self.size / self._timed(lambda: self._queue(1, times)) / 1e9

    def both_ways(self, times: int = 1) -> float:
        """Both at once, their bytes together."""

        def both() -> None:
            for way in range(2):
                self._queue(way, times)

        return 2 * times * self.size / self._timed(both) / 1e9

    def _queue(self, way: int, times: int) -> None:
        source, target = (self._host[0], self._device[0]) if way == 0 else (self._device[1], self._host[1])
        if not self._cuda:
            for _ in range(times):
                target.copy_(source)
            return
        with torch.cuda.stream(self._streams[way]):
            for _ in range(times):
                target.copy_(source, non_blocking=True)

    def _timed(self, work: Callable[[], None]) -> float:
        _wait(self._device.device.type)
        began = time.perf_counter()
        work()
        _wait(self._device.device.type)
        return time.perf_counter() - began


def memory_bandwidth(device: str, nbytes: int, rounds: int) -> Spread:
    """GB/s of copies of `nbytes` within the device's memory: bytes read and bytes written."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = 1 + LEAST_BYTES // nbytes if device == "cpu" else 8
    rates = []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            target.copy_(source)
        _wait(device)
        rates.append(2 * nbytes * times / (time.perf_counter() - began) / 1e9)
    if device == "cuda":
        del source, target
        torch.cuda.empty_cache()  # an engine that comes next looks at what is free
    return Spread.over(rates[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(context: StageContext) -> None:
    """Copies of every size, each way alone and both at once."""
    plan, journal, device = context.plan.copies, context.journal, context.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SkipStage("there is no CUDA device")
    _describe(context)
    journal.figure("Device memory, read and written", "GB/s", memory_bandwidth(device, plan.memory_bytes, plan.rounds))
    for size in plan.sizes:
        _measure(context, plan, size)


def _describe(context: StageContext) -> None:
    journal = context.journal
    journal.fact("torch", torch.__version__)
    journal.fact("CUDA of torch", torch.version.cuda)
    if context.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        journal.fact("device", properties.name)
        journal.fact("compute capability", f"{properties.major}.{properties.minor}")
        journal.fact("device memory", f"{properties.total_memory / 2**30:.1f} GiB")


def _measure(context: StageContext, plan: CopyPlan, size: int) -> None:
    copies, journal = PlainCopies(size, context.device), context.journal
    times = max(1, LEAST_BYTES // size) if context.device == "cuda" else 1
    ways = {"to the device": copies.to_device, "to the host": copies.to_host, "both ways": copies.both_ways}
    for name, copy in ways.items():
        rates = [copy(times) for _ in range(plan.rounds + 1)][1:]
        journal.samples(f"{name}, {size} bytes, GB/s", rates)
        journal.point("Pinned copies", name, size / MIB, median(rates))
        if size == plan.sizes[-1]:
            journal.figure(f"Pinned copy {name}, {size / MIB:g} MiB", "GB/s", Spread.over(rates))
