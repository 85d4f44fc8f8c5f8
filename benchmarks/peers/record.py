"""What is kept of one run: every raw round and what is needed to repeat it, and the tables."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Machine, describe_machine, own_versions
from benchmarks.peers.peers import VLLM
from benchmarks.peers.report import ratio_table, variant_table
from benchmarks.peers.rounds import Round
from benchmarks.peers.workload import Plan
from benchmarks.results import file_stem, utc_now, write_results
from benchmarks.tables import to_markdown
from loadgen.peers.registry import find_peer
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import ROOT, Launch, without_folders


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that went into the JSON. launches: by "PEER DTYPE"; versions: by environment, then by package."""

    date: str
    model: str
    machine: Machine
    versions: dict[str, dict[str, str]]
    plan: Plan
    launches: dict[str, Launch]
    rounds: list[Round]


def describe_run(
    model: Path,
    plan: Plan,
    launches: dict[str, Launch],
    cores: list[int],
    rounds: list[Round],
) -> Run:
    """Gathers the record."""
    folders = [ROOT, peers_folder(), model.parent]
    return Run(
        date=utc_now(),
        model=model.name,
        machine=describe_machine(cores),
        versions=_versions(with_vllm=any(entry.peer == VLLM for entry in rounds)),
        plan=plan,
        launches={name: without_folders(launch, folders) for name, launch in launches.items()},
        rounds=rounds,
    )


def write_run(folder: Path, run: Run) -> Path:
    """Writes `CPU-CORES-DATE.json` and `.md`; returns the latter."""
    stem = file_stem(run.machine.cpu, run.machine.cores, run.date)
    return write_results(folder, stem, run, _markdown(run))


def _versions(*, with_vllm: bool) -> dict[str, dict[str, str]]:
    """Package versions that Djinn and Transformers ran with and, if it took part, those of vLLM."""
    versions = {"djinn, transformers": own_versions()}
    if with_vllm:
        versions[VLLM] = find_peer(VLLM).versions()
    return versions


def _markdown(run: Run) -> str:
    measurements = [entry.measurement for entry in run.rounds]
    client = max(measurement.client_cpu_share for measurement in measurements)
    others = max(measurement.other_cpu_share for measurement in measurements)
    heading = [
        f"# {run.model} on {run.machine.cpu}, {run.machine.cores} cores, {run.date}",
        "",
        f"Rounds: {1 + max(entry.number for entry in run.rounds)}. Tokens a stream: {run.plan.max_tokens}. "
        "Figures are medians over rounds [lowest, highest].",
        f"Of the cores, the load client had at most {client:.1%}, processes outside the benchmark {others:.1%}.",
        "",
    ]
    return "\n".join([*heading, to_markdown(ratio_table(run.rounds)), to_markdown(variant_table(run.rounds))])
