"""What is kept of one run: every raw round and what is needed to repeat it, and the tables.

One table is of ratios, the other of every data type.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.peers.peers import DJINN, PEERS, TRANSFORMERS
from benchmarks.peers.rounds import Round
from benchmarks.peers.summary import Metric, best_by_peer, metrics_of, times_better, values_by_variant
from benchmarks.peers.workload import Plan
from loadgen.peers.registry import find_peer
from loadgen.processes.calibration import Calibration
from loadgen.processes.folders import peers_folder
from loadgen.processes.launch import ROOT, Launch, without_folders
from loadgen.results.spread import Spread
from loadgen.results.tables import TextTable, to_markdown

NAMES = {"djinn": "Djinn", "vllm": "vLLM", "llamacpp": "llama.cpp", "transformers": "Transformers"}


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
    servers = {entry.peer for entry in rounds} - {DJINN, TRANSFORMERS}
    return Run(
        model=model.name,
        plan=plan,
        peer_versions={peer: find_peer(peer).versions() for peer in sorted(servers)},
        launches={name: without_folders(launch, folders) for name, launch in launches.items()},
        rounds=rounds,
    )


def write_run(folder: Path, run: Run) -> Path:
    """Writes `FLAGS-CORES-DATE.json` and `.md`; returns the latter."""
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
        *best_types(run),
        "",
    ]
    return "\n".join([*heading, to_markdown(ratio_table(run.rounds)), to_markdown(variant_table(run.rounds))])


def best_types(run: Run) -> list[str]:
    """A sentence for each peer whose type was measured to be its best."""
    return [
        f"`{name}` multiplies in {found.dtype}. {' '.join(_products(found))}"
        for name, launch in run.launches.items()
        if (found := launch.calibration) is not None
    ]


def _products(found: Calibration) -> Iterator[str]:
    for place, rows in enumerate(found.rows):
        times = " and ".join(f"{1e3 * seconds[place]:.2f} ms in {dtype}" for dtype, seconds in found.seconds.items())
        yield f"A product of {rows} {'row' if rows == 1 else 'rows'} takes {times}."


def ratio_table(rounds: list[Round]) -> TextTable:
    """Each peer's best data type, and how many times better Djinn is where it took part."""
    peers = [peer for peer in PEERS if any(entry.peer == peer for entry in rounds)]
    baselines = [peer for peer in peers if peer != DJINN] if DJINN in peers else []
    header = ("", *(NAMES[peer] for peer in peers), *(f"Djinn vs. {NAMES[peer]}" for peer in baselines))
    rows = []
    for metric in metrics_of(rounds[0].measurement):
        best = best_by_peer(rounds, metric)
        cells = [f"{_figure(metric, best[peer].spread.median)} ({best[peer].dtype})" for peer in peers]
        ratios = [_ratio(times_better(rounds, metric, DJINN, peer)) for peer in baselines]
        rows.append((f"{metric.label} ({metric.unit})", *cells, *ratios))
    return TextTable("Best data type of each", header, rows)


def variant_table(rounds: list[Round]) -> TextTable:
    """Every peer with every data type: median, lowest and highest round."""
    variants = list(dict.fromkeys((entry.peer, entry.dtype) for entry in rounds))
    variants.sort(key=lambda variant: PEERS.index(variant[0]))
    rows = []
    for metric in metrics_of(rounds[0].measurement):
        values = values_by_variant(rounds, metric)
        cells = [_range(metric, Spread.over(list(values[variant].values()))) for variant in variants]
        rows.append((f"{metric.label} ({metric.unit})", *cells))
    return TextTable("Every data type", ("", *(f"{NAMES[peer]} {dtype}" for peer, dtype in variants)), rows)


def _figure(metric: Metric, value: float) -> str:
    return f"{value:.1f}" if metric.higher_is_better else f"{value:.3f}"


def _range(metric: Metric, values: Spread) -> str:
    return _figure(metric, values.median) + _bounds(_figure(metric, values.low), _figure(metric, values.high))


def _ratio(values: Spread) -> str:
    return f"{values.median:.2f}×" + _bounds(f"{values.low:.2f}", f"{values.high:.2f}")


def _bounds(low: str, high: str) -> str:
    """Nothing where one round leaves nothing to say."""
    return "" if low == high else f" [{low}, {high}]"
