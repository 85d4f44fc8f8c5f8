"""The result file of the experiment, and the targets that its figures are held against."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loadgen.experiments.weights.chunks import Choice, ChunkRow
from loadgen.experiments.weights.findings import Findings, Way
from loadgen.experiments.weights.plan import Cell, WeightsPlan
from loadgen.experiments.weights.sizes import ModelBytes
from loadgen.experiments.weights.summary import Measure, Summary
from loadgen.results.files import Result
from loadgen.results.inputs import Server, Texts
from loadgen.results.spread import Spread, in_words
from loadgen.results.verdicts import Verdict, all_well, verdict, verdict_of_spread


@dataclass(frozen=True, slots=True)
class Model:
    """What ran, of which `budget_bytes` of weights may be on the device."""

    name: str
    dtype: str
    bytes: ModelBytes
    budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport(Result):
    """One run of the experiment: a comparison, or a sweep over `chunks` from which one is chosen."""

    experiment: Literal["weights"] = "weights"
    plan: WeightsPlan
    texts: Texts
    model: Model
    servers: tuple[Server, ...]
    findings: Findings
    summary: Summary
    chunks: tuple[ChunkRow, ...]
    choice: Choice | None
    verdicts: tuple[Verdict, ...]

    @property
    def interrupted(self) -> bool:
        return self.findings.interrupted

    @property
    def succeeded(self) -> bool:
        return all_well(self.verdicts, self.findings.failures, interrupted=self.interrupted)


OF_PLAIN = 0.9
OVER_PASS = 1.3
WORDS = {Measure.FIRST: "time to the first token", Measure.RATE: "tokens/s"}


def judge(summary: Summary, findings: Findings, cells: Sequence[Cell]) -> tuple[Verdict, ...]:
    """Every target, in the order of the report.

    The bandwidth is held against that of plain copies where copying is what takes the time: with the fewest sessions.
    """
    fewest = min(cell.batch for cell in cells)
    return (
        *(_of_plain(summary, cell) for cell in cells if cell.batch == fewest),
        *_ahead_of_accelerate(summary, cells),
        *_over_pass(summary, findings, fewest),
        _same_answers(summary, fewest),
    )


def _of_plain(summary: Summary, cell: Cell) -> Verdict:
    ratio = summary.ratio(Way.PLAIN, cell, Measure.BANDWIDTH)
    return _at_least(f"bandwidth over that of plain copies, {cell}", f"≥ {OF_PLAIN:g}", ratio, OF_PLAIN)


def _ahead_of_accelerate(summary: Summary, cells: Sequence[Cell]) -> Iterator[Verdict]:
    for measure, words in WORDS.items():
        for cell in cells:
            ratio = summary.ratio(Way.ACCELERATE, cell, measure)
            yield _at_least(f"{words}: times better than {Way.ACCELERATE}, {cell}", "> 1", ratio, 1.0)


def _over_pass(summary: Summary, findings: Findings, fewest: int) -> Iterator[Verdict]:
    """On a GPU, where the prompt is computed in much less time than the weights take to come."""
    if findings.device != "cuda":
        return
    for each in summary.over_pass:
        if each.cell == Cell(fewest):
            met, could_be = each.ratio.median <= OVER_PASS, each.ratio.low <= OVER_PASS
            what = f"time to the first token over one pass of plain copies, {each.cell}"
            yield verdict_of_spread(what, f"≤ {OVER_PASS:g}", in_ratio(each.ratio), met=met, could_be=could_be)


def _same_answers(summary: Summary, fewest: int) -> Verdict:
    """With few sessions the two servers compute the same batches. With more it is chance who meets whom in a step."""
    each = next((each for each in summary.agreements if (each.way, each.cell) == (Way.STREAMED, Cell(fewest))), None)
    what = f"answers that are those of {Way.RESIDENT}, {Cell(fewest)}"
    if each is None:
        return verdict(what, "all", "", None)
    return verdict(what, "all", f"{each.same} of {each.compared}", each.same == each.compared)


def _at_least(what: str, target: str, ratio: Spread | None, bound: float) -> Verdict:
    if ratio is None:
        return verdict(what, target, "", None)
    met, could_be = ratio.median >= bound, ratio.high >= bound
    return verdict_of_spread(what, target, in_ratio(ratio), met=met, could_be=could_be)


def in_ratio(ratio: Spread | None) -> str:
    """Two digits after the point."""
    return in_words(ratio, "{:.2f}".format)
