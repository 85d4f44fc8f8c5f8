"""The machine around the device: memory, locked memory, NUMA nodes, the disk, versions, and what is installed."""

import os
import platform
import resource
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from app.doctor.device import choose_device
from app.doctor.probe import GPU, Finding, MachineProbe, error, newest_cuda, ok, warning
from app.domain.values import AUTO_DTYPES
from app.machine.files import GIB, file_system, is_of_network, parse_list, read, read_field, size
from app.machine.memory import HostMemory
from app.settings import Settings

DEVICE = "device_memory"
HOST = "host_memory"
LEAST_FREE_MEMORY = GIB
"""With less there is no room for any model and its KV."""
DEVICE_SHARE = 0.9
"""Of a GPU's memory that nobody else should be using; CUDA's own context takes a few hundred megabytes."""


def check_device_memory(gpu: GPU | None) -> Finding:
    """`gpu`: None where the device is a CPU."""
    if gpu is None:
        return ok(DEVICE, "the same as host memory")
    summary = f"{size(gpu.free_bytes)} free of {size(gpu.total_bytes)}"
    remedy = "nvidia-smi lists the processes that use this GPU: stop them"
    if gpu.free_bytes < LEAST_FREE_MEMORY:
        return error(DEVICE, summary, remedy)
    if gpu.free_bytes < DEVICE_SHARE * gpu.total_bytes:
        return warning(DEVICE, f"{summary}: others use it", remedy)
    return ok(DEVICE, summary)


def check_host_memory(memory: HostMemory) -> Finding:
    """What weights, KV of sessions that wait, and on a CPU everything, must fit."""
    summary = f"{size(memory.free_bytes)} free of {size(memory.total_bytes)}"
    if memory.free_bytes < LEAST_FREE_MEMORY:
        return error(HOST, summary, "stop other processes, or give the container more memory (docker run --memory)")
    if memory.limit is not None and memory.limit.free_bytes < memory.available_bytes:
        return warning(
            HOST,
            f"{summary}: this container may use {size(memory.limit.limit_bytes)}, but defaults go by the machine",
            "give the container more memory, or set --kv-host, and on a CPU --kv-device, so that all fits",
        )
    return ok(HOST, summary)


MEMLOCK = "memlock"
PINNED = "pinned_memory"
RAISE_LIMIT = "ulimit -l unlimited (docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"


@dataclass(frozen=True, slots=True)
class Pinned:
    """An attempt to pin `bytes` of host memory. problem: why it failed, None if it did not."""

    bytes: int
    problem: str | None


def read_memlock() -> int | None:
    """`ulimit -l` in bytes; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_memlock(limit: int | None, pinned: Pinned | None, host_total: int) -> Finding:
    """`pinned`: None where nothing is pinned. `host_total`: bytes of memory in the machine.

    NVIDIA's driver usually locks pages without a look at this limit; a sandbox may look. Only an attempt at more than
    the limit tells.
    """
    if limit is None or limit >= host_total:
        return ok(MEMLOCK, "unlimited" if limit is None else size(limit))
    if pinned is None:
        return ok(MEMLOCK, f"{size(limit)}; nothing is to be pinned")
    if pinned.problem is None and pinned.bytes > limit:
        return ok(MEMLOCK, f"{size(limit)}, which the driver does not count pinned memory against")
    return warning(MEMLOCK, f"{size(limit)}; more host memory for KV may not be pinned", RAISE_LIMIT)


def check_pinned(pinned: Pinned) -> Finding:
    """Whether host memory could be pinned at all."""
    if pinned.problem is None:
        return ok(PINNED, f"{size(pinned.bytes)} allocated")
    return error(
        PINNED, f"{size(pinned.bytes)} could not be allocated: {pinned.problem}", f"free memory; {RAISE_LIMIT}"
    )


NUMA = "numa"


@dataclass(frozen=True, slots=True)
class Numa:
    """nodes: all that have CPUs. gpu_node: the GPU's, None if it has none or the machine does not tell.
    process_nodes: of the CPUs that this process may run on. memory_nodes: those it may have memory of.
    """

    nodes: tuple[int, ...]
    gpu_node: int | None
    process_nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]


def read_numa(root: Path, pci_address: str | None) -> Numa:
    """`pci_address`: the GPU's, None without one."""
    cpus = {
        int(folder.name.removeprefix("node")): parse_list(read(folder / "cpulist") or "")
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
    }
    nodes = sorted(node for node in cpus if cpus[node])
    status = root / "proc/self/status"  # sandboxes leave lines out
    allowed = parse_list(read_field(status, "Cpus_allowed_list") or "") or frozenset().union(*cpus.values())
    memory = parse_list(read_field(status, "Mems_allowed_list") or "") or cpus.keys()
    gpu_node = int(read(root / "sys/bus/pci/devices" / pci_address / "numa_node") or -1) if pci_address else -1
    return Numa(
        nodes=tuple(nodes),
        gpu_node=None if gpu_node < 0 else gpu_node,  # the kernel's -1 is "not told"
        process_nodes=tuple(node for node in nodes if cpus[node] & allowed),
        memory_nodes=tuple(sorted(memory & cpus.keys())),
    )


def check_numa(numa: Numa, device: str, *, numactl: bool) -> Finding:
    """`numactl`: whether that program is installed."""
    if len(numa.nodes) <= 1:
        return ok(NUMA, "one node, for processes and devices alike")
    install = "" if numactl else "install numactl, then: "
    summary = f"process on {_names(numa.process_nodes)} of {_names(numa.nodes)}"
    if device == "cpu":
        if len(numa.process_nodes) == 1:
            return ok(NUMA, summary)
        return warning(NUMA, f"{summary}: memory may be on any of them", install + _bind(numa.process_nodes[0], device))
    if numa.gpu_node is None:
        return warning(
            NUMA,
            f"{summary}; the machine does not tell which is the GPU's",
            f"find it with `nvidia-smi topo -m`; {install}{_bind('N', device)}",
        )
    return _check_gpu_node(numa, numa.gpu_node, f"GPU on node {numa.gpu_node}, {summary}", install, device)


def _check_gpu_node(numa: Numa, node: int, summary: str, install: str, device: str) -> Finding:
    if node not in numa.process_nodes or node not in numa.memory_nodes:
        return warning(
            NUMA,
            f"{summary}, memory on {_names(numa.memory_nodes)}: this process is kept off the GPU's node",
            f"{install}{_bind(node, device, '--all ')}; a container needs --cpuset-mems={node} and --cpuset-cpus of it",
        )
    if numa.process_nodes != (node,):
        return warning(NUMA, summary, install + _bind(node, device))
    return ok(NUMA, summary)


def _bind(node: int | str, device: str, scope: str = "") -> str:
    """The command that keeps the server on one node. `--all` lets numactl leave the CPUs that it is bound to itself."""
    return f"numactl {scope}--cpunodebind={node} --membind={node} djinn serve --device {device}"


def _names(nodes: tuple[int, ...]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"


DISK = "disk"
IN_MEMORY = ("tmpfs", "ramfs")
LEAST_FREE_ON_DISK = GIB
ELSEWHERE = "name another folder with --state-dir"


@dataclass(frozen=True, slots=True)
class Disk:
    """state_dir: as given. folder: the part of it that exists. Sizes in bytes, of the file system it is on."""

    state_dir: str
    folder: str
    writable: bool
    file_system: str
    free_bytes: int
    total_bytes: int


def read_disk(state_dir: Path) -> Disk:
    """Changes nothing: a folder that is not there yet is judged by where it will be."""
    path = state_dir.absolute()
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    usage = shutil.disk_usage(folder)
    return Disk(
        state_dir=str(state_dir),
        folder=str(folder),
        writable=folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        file_system=file_system(folder),
        free_bytes=usage.free,
        total_bytes=usage.total,
    )


def check_disk(disk: Disk | None) -> Finding:
    """`disk`: None where there is no disk tier."""
    if disk is None:
        return ok(DISK, "no state directory: KV is never on disk, and sessions do not survive a restart")
    summary = f"{size(disk.free_bytes)} free of {size(disk.total_bytes)} for {disk.state_dir}"
    if not disk.writable:
        summary = f"{disk.state_dir}: Djinn cannot write to {disk.folder}"
        return error(DISK, summary, f"make it writable, or {ELSEWHERE}")
    if disk.file_system in IN_MEMORY:
        return warning(DISK, f"{summary}, which is memory ({disk.file_system}): gone after a restart", ELSEWHERE)
    if is_of_network(disk.file_system):
        return warning(
            DISK, f"{summary}, over the network ({disk.file_system}), where SQLite's WAL is not safe", ELSEWHERE
        )
    if disk.free_bytes < LEAST_FREE_ON_DISK:
        return warning(DISK, f"{summary}: hardly any KV fits", f"make room, or {ELSEWHERE}")
    return ok(DISK, summary)


TORCH = "torch"
TRITON = "triton"
PACKAGES = (TORCH, TRITON, "transformers")
NEEDED_BY = ("djinn-server", TORCH)
"""PyTorch asks for its own version of Triton."""


@dataclass(frozen=True, slots=True)
class Package:
    """installed: None if it is not. required: such as ">=2.11,<3"; None if nothing that is installed asks for it."""

    installed: str | None
    required: str | None


@dataclass(frozen=True, slots=True)
class Versions:
    """packages: by name."""

    python: str
    djinn: str | None
    packages: dict[str, Package]


def read_versions() -> Versions:
    """From the metadata of what is installed; Djinn itself may run from its source alone."""
    required = _requirements()
    return Versions(
        python=platform.python_version(),
        djinn=_version("djinn-server"),
        packages={name: Package(_version(name), required.get(name)) for name in PACKAGES},
    )


def _requirements() -> dict[str, str]:
    found = {}
    for needer in filter(_version, NEEDED_BY):
        for line in requires(needer) or ():
            requirement = Requirement(line)
            if requirement.name in PACKAGES and (requirement.marker is None or requirement.marker.evaluate()):
                found[requirement.name] = str(requirement.specifier)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_versions(versions: Versions, torch_cuda: str | None, device: str) -> list[Finding]:
    """One line each. `torch_cuda`: the version of CUDA that PyTorch is built for."""
    djinn = "Djinn from source" if versions.djinn is None else f"Djinn {versions.djinn}"
    torch_note = "without CUDA" if torch_cuda is None else f"for CUDA {torch_cuda}"
    return [
        ok("python", f"{versions.python}, {djinn}"),
        *(
            _check(name, package, torch_note if name == TORCH else "", device)
            for name, package in versions.packages.items()
        ),
    ]


def _check(name: str, package: Package, note: str, device: str) -> Finding:
    if package.installed is None:
        if name == TRITON and device == "cpu":
            return ok(name, "not installed, and not needed on a CPU")
        return error(name, "not installed", f"pip install '{name}{package.required or ''}'")
    summary = ", ".join(filter(None, (package.installed, note)))
    if package.required and not Requirement(name + package.required).specifier.contains(package.installed, True):
        return error(name, f"{summary}; needed is {package.required}", f"pip install '{name}{package.required}'")
    return ok(name, summary)


def describe_installation(settings: Settings) -> str:
    """What `djinn --version` says: a line with Djinn's version, and one for each of the other facts.

    Raises `FieldOutOfRange` if the settings ask for something that is no device.
    """
    versions = read_versions()
    # PyTorch, which counts GPUs, takes seconds to load, and finds none where there is no driver.
    counts = settings.device == "auto" and newest_cuda() is not None
    device = choose_device(settings.device, MachineProbe().build().gpu_count if counts else 0)
    facts = {
        "djinn": versions.djinn,
        "models": settings.cache_dir.expanduser(),
        "device": device,
        "dtype": AUTO_DTYPES[device.partition(":")[0]] if settings.dtype == "auto" else settings.dtype,
        "python": versions.python,
        TORCH: versions.packages[TORCH].installed,
    }
    return "\n".join(f"{name} {fact}" for name, fact in facts.items())
