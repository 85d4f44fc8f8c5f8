"""The files of one run: JSON with every raw round and what is needed to repeat it, Markdown with the tables."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import orjson

from benchmarks.peers.machine import Machine, describe_machine, describe_versions, file_stem
from benchmarks.peers.peers import ROOT, Launch, without_folders
from benchmarks.peers.report import ratio_table, to_markdown, variant_table
from benchmarks.peers.rounds import Round
from benchmarks.peers.workload import Plan

INDENT = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


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
    vllm_environment: Path | None,
    rounds: list[Round],
) -> Run:
    """Gathers the record. `vllm_environment` is None where vLLM took no part."""
    return Run(
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        model=model.name,
        machine=describe_machine(cores),
        versions=describe_versions(vllm_environment),
        plan=plan,
        launches={name: without_folders(launch, [ROOT, model.parent]) for name, launch in launches.items()},
        rounds=rounds,
    )


def write_results(folder: Path, run: Run) -> Path:
    """Writes `CPU-CORES-DATE.json` and `.md`; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / file_stem(run.machine.cpu, run.machine.cores, run.date)
    stem.with_suffix(".json").write_bytes(orjson.dumps(run, option=INDENT))
    markdown = stem.with_suffix(".md")
    markdown.write_text(_markdown(run))
    return markdown


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
