"""What is kept of one run: every raw round and what is needed to repeat it, and the tables."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.peers.peers import VLLM
from benchmarks.peers.report import ratio_table, variant_table
from benchmarks.peers.rounds import Round
from benchmarks.peers.workload import Plan
from loadgen.peers.registry import find_peer
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.results.tables import to_markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(record.Run):
    """Everything that went into the JSON. launches: by "PEER DTYPE"; peer_versions: by peer, then by package."""

    plan: Plan
    peer_versions: dict[str, dict[str, str]]
    launches: dict[str, Launch]
    rounds: list[Round]


def describe_run(model: Path, plan: Plan, launches: dict[str, Launch], rounds: list[Round]) -> Run:
    """The record, without the folders of this machine."""
    folders = [ROOT, peers_folder(), model.parent]
    with_vllm = any(entry.peer == VLLM for entry in rounds)
    return Run(
        model=model.name,
        plan=plan,
        peer_versions={VLLM: find_peer(VLLM).versions()} if with_vllm else {},
        launches={name: without_folders(launch, folders) for name, launch in launches.items()},
        rounds=rounds,
    )


def write_run(folder: Path, run: Run) -> Path:
    """Writes `CPU-CORES-DATE.json` and `.md`; returns the latter."""
    return record.write_run(folder, "", run, _markdown(run))


def _markdown(run: Run) -> str:
    measurements = [entry.measurement for entry in run.rounds]
    client = max(measurement.client_cpu_share for measurement in measurements)
    others = max(measurement.other_cpu_share for measurement in measurements)
    heading = [
        f"# {run.model} on {run.place_and_time}",
        "",
        f"Rounds: {1 + max(entry.number for entry in run.rounds)}. Tokens a stream: {run.plan.max_tokens}. "
        "Figures are medians over rounds [lowest, highest].",
        f"Of the cores, the load client had at most {client:.1%}, processes outside the benchmark {others:.1%}.",
        "",
    ]
    return "\n".join([*heading, to_markdown(ratio_table(run.rounds)), to_markdown(variant_table(run.rounds))])
