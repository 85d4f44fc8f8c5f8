"""Free memory on the device and in the host tier."""

from app.doctor.findings import Finding, error, ok, warning
from app.doctor.probe import GPU
from app.machine.memory import HostMemory
from app.machine.units import GIB, size

DEVICE = "device_memory"
HOST = "host_memory"
LEAST_FREE = GIB
"""With less there is no room for any model and its KV."""
DEVICE_SHARE = 0.9
"""Of a GPU's memory that nobody else should be using; CUDA's own context takes a few hundred megabytes."""


def check_device_memory(gpu: GPU | None) -> Finding:
    """`gpu`: None where the device is a CPU."""
    if gpu is None:
        return ok(DEVICE, "the same as host memory")
    summary = f"{size(gpu.free_bytes)} free of {size(gpu.total_bytes)}"
    remedy = "nvidia-smi lists the processes that use this GPU: stop them"
    if gpu.free_bytes < LEAST_FREE:
        return error(DEVICE, summary, remedy)
    if gpu.free_bytes < DEVICE_SHARE * gpu.total_bytes:
        return warning(DEVICE, f"{summary}: others use it", remedy)
    return ok(DEVICE, summary)


def check_host_memory(memory: HostMemory) -> Finding:
    """What weights, KV of sessions that wait, and on a CPU everything, must fit."""
    summary = f"{size(memory.free_bytes)} free of {size(memory.total_bytes)}"
    if memory.free_bytes < LEAST_FREE:
        return error(HOST, summary, "stop other processes, or give the container more memory (docker run --memory)")
    if memory.limit is not None and memory.limit.free_bytes < memory.available_bytes:
        return warning(
            HOST,
            f"{summary}: this container may use {size(memory.limit.limit_bytes)}, but defaults go by the machine",
            "give the container more memory, or set --kv-host, and on a CPU --kv-device, so that all fits",
        )
    return ok(HOST, summary)
