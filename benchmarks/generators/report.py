"""What is kept of one run: every raw round and what is needed to repeat it, and the table with what its words mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.generators.comparison import FIGURES, TOLERANCE, Comparison, Round
from benchmarks.generators.load import Load
from loadgen.processes.launch import Launch
from loadgen.results.spread import Spread
from loadgen.results.tables import TextTable, to_markdown

DEFINITIONS = f"""\
Both generators send the same requests at the same times to `/v1/completions`: so many tokens of prompt, greedy,
streamed, `ignore_eos`. Texts are the generators' own, other ones in every run, so that the server's prefix cache helps
neither. Two loads: `steady`, which the server keeps up with, and `burst`, which is more than it can do at once.

- **TTFT** is the time to the first chunk with text. Both clocks start when the first bytes of the request
  are written.
- **Output** is completion tokens divided by the time from the first request to the end of the last. GuideLLM's window
  begins when it has sent the first request, ours when that request is due.
- Medians are of an odd number of requests: of an even number GuideLLM takes the lower neighbour, loadgen the middle.
- GuideLLM runs one worker process instead of its ten, because they share the server's cores; it asks for the usage in
  every chunk, and sends text that the server tokenizes; loadgen sends token ids.
- GuideLLM mostly loses its last answer: its scheduler ends on a timeout that falls between the note that all is done
  and the answer itself. It is given one request more, a second after the others, to lose. A pair of runs in which one
  measured another load than was asked for is measured again.
- The ratio is ours to GuideLLM's, the median over rounds of each round's. They agree within {TOLERANCE:.0%}.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(record.Run):
    """Everything that went into the JSON. rival_versions: by package; discarded: why pairs of runs were measured
    again.
    """

    rival_versions: dict[str, str]
    launch: Launch
    loads: tuple[Load, ...]
    rounds: list[Round]
    comparisons: list[Comparison]
    discarded: list[str]


def write_run(folder: Path, run: Run, table: TextTable) -> Path:
    """Writes `generators-FLAGS-CORES-DATE.json` and `.md`; returns the latter."""
    return record.write_run(folder, "generators-", run, _markdown(run, table))


def _markdown(run: Run, table: TextTable) -> str:
    own_latest = max(entry.own.latest_s for entry in run.rounds)
    rival_latest = max(entry.rival.latest_s for entry in run.rounds)
    others = max(entry.other_cpu_share for entry in run.rounds)
    lines = [
        f"# Two load generators on {run.model}, {run.place_and_time}",
        "",
        DEFINITIONS,
        *(f"- {describe_load(load)}" for load in run.loads),
        "",
        f"Rounds: {1 + max(entry.number for entry in run.rounds)}. Figures are medians over rounds [lowest, highest].",
        f"Of the cores, processes outside the benchmark had at most {others:.1%}.",
        f"Requests were sent at most {own_latest:.3f} s late by loadgen, {rival_latest:.3f} s by GuideLLM.",
        *(f"Measured again: {reason}." for reason in run.discarded),
        "",
    ]
    return "\n".join([*lines, to_markdown(table)])


def comparison_table(comparisons: Sequence[Comparison], own: str, rival: str) -> TextTable:
    """Medians over rounds [lowest, highest]."""
    rows = [
        (
            f"{entry.load}: {FIGURES[entry.figure]}",
            _figure(entry.own),
            _figure(entry.rival),
            _ratio(entry.ratio),
            "yes" if entry.agrees else "NO",
        )
        for entry in comparisons
    ]
    return TextTable(f"{own} beside {rival}", ("", own, rival, "ratio", "agree"), rows)


def describe_load(load: Load) -> str:
    """Such as `steady: 41 requests, 1.5 per second, 192 prompt and 32 completion tokens each`."""
    arrivals = "all at once" if load.rate == float("inf") else f"{load.rate:g} per second"
    lengths = f"{load.prompt_tokens} prompt and {load.completion_tokens} completion tokens each"
    return f"{load.name}: {load.requests} requests, {arrivals}, {lengths}"


def _figure(spread: Spread) -> str:
    return f"{spread.median:.3g} [{spread.low:.3g}, {spread.high:.3g}]"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f}× [{spread.low:.2f}, {spread.high:.2f}]"
