"""Which NUMA node the GPU and this process are on: KV that crosses from one to the other is slower both ways."""

from dataclasses import dataclass
from pathlib import Path

from app.doctor.findings import Finding, ok, warning
from app.machine.files import parse_list, read, read_field

NAME = "numa"


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
        return ok(NAME, "one node, for processes and devices alike")
    install = "" if numactl else "install numactl, then: "
    summary = f"process on {_names(numa.process_nodes)} of {_names(numa.nodes)}"
    if device == "cpu":
        if len(numa.process_nodes) == 1:
            return ok(NAME, summary)
        return warning(NAME, f"{summary}: memory may be on any of them", install + _bind(numa.process_nodes[0], device))
    if numa.gpu_node is None:
        return warning(
            NAME,
            f"{summary}; the machine does not tell which is the GPU's",
            f"find it with `nvidia-smi topo -m`; {install}{_bind('N', device)}",
        )
    return _check_gpu_node(numa, numa.gpu_node, f"GPU on node {numa.gpu_node}, {summary}", install, device)


def _check_gpu_node(numa: Numa, node: int, summary: str, install: str, device: str) -> Finding:
    if node not in numa.process_nodes or node not in numa.memory_nodes:
        return warning(
            NAME,
            f"{summary}, memory on {_names(numa.memory_nodes)}: this process is kept off the GPU's node",
            f"{install}{_bind(node, device, '--all ')}; a container needs --cpuset-mems={node} and --cpuset-cpus of it",
        )
    if numa.process_nodes != (node,):
        return warning(NAME, summary, install + _bind(node, device))
    return ok(NAME, summary)


def _bind(node: int | str, device: str, scope: str = "") -> str:
    """The command that keeps the server on one node. `--all` lets numactl leave the CPUs that it is bound to itself."""
    return f"numactl {scope}--cpunodebind={node} --membind={node} djinn serve --device {device}"


def _names(nodes: tuple[int, ...]) -> str:
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(map(str, nodes))}"
