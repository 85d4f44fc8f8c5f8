"""What the figures were taken on."""

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

OWN_PACKAGES = ("djinn", "torch", "transformers", "numba", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """vector_extensions: those that decide about kernels; cores: how many the benchmark was bound to."""

    cpu: str
    vector_extensions: list[str]
    cores: int
    memory_bytes: int | None
    kernel: str
    python: str


def bind_to_cores(count: int) -> list[int]:
    """Binds this process, and every process that it starts from now on, to its first `count` cores; returns them."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


def cpu_name() -> str:
    """Such as "AMD EPYC"; the machine type where the kernel does not tell."""
    match = re.search(r"^model name\s*:\s*(.+)$", _read("cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def describe_machine(cores: list[int]) -> Machine:
    """This machine, of which only `cores` are used."""
    extensions = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|avx512_vnni|amx_\w+)\b", _read("cpuinfo")))
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", _read("meminfo"), re.MULTILINE)
    return Machine(
        cpu=cpu_name(),
        vector_extensions=sorted(extensions),
        cores=len(cores),
        memory_bytes=int(memory.group(1)) * 1024 if memory else None,
        kernel=platform.release(),
        python=platform.python_version(),
    )


def own_versions() -> dict[str, str]:
    """Versions of the packages that decide about Djinn's speed."""
    return {name: version(name) for name in OWN_PACKAGES}


def _read(name: str) -> str:
    return (Path("/proc") / name).read_text()
