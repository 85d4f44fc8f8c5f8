"""`python -m loadgen weights`: what it costs to run a model that is several times larger than the memory for its
weights.

Djinn streams them through that memory at every pass. It is compared with itself without a budget, with a hand-written
double buffer, with the offload of others, and with copies of the same bytes without computing. A sweep tells how large
Djinn's copies should be.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.weights.measuring import Bench, Seen, measure, measure_chunks
from loadgen.experiments.weights.page_cache import PERIOD_S
from loadgen.experiments.weights.plan import Cell, Sample, Setup, Way, WeightsPlan
from loadgen.experiments.weights.sizes import Budget, parse_bytes, read_model_bytes
from loadgen.load.corpus import Corpus
from loadgen.options.common import add_common, finish, make_output, read_corpus
from loadgen.options.plan_fields import add_plan_options, read_plan
from loadgen.options.servers import add_server_options, read_settings
from loadgen.options.targets import run_on
from loadgen.peers.dtypes import AUTO, ELEMENT_BYTES
from loadgen.processes.folders import peers_folder
from loadgen.report.charts import Chart
from loadgen.report.failures import ending_early, noting
from loadgen.report.figures import Figure, Spread, Target, all_of
from loadgen.report.origin import Server, Texts
from loadgen.report.progress import show_parts
from loadgen.report.report import Report
from loadgen.report.tables import Row, Table
from loadgen.report.text import in_bytes
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject

RUN, SIZES = "the run", "sizes of copies"
BUDGET, DTYPE = "1/6", "float32"
NEAR_BEST = 0.98
"""Of the best bandwidth: what is above that is as good, as far as one can tell."""
OF_PLAIN, AHEAD, OVER_PASS = Target(0.9, at_least=True), Target(1.0, at_least=True), Target(1.3)
SAMPLES, MEDIANS, SWEPT = "samples", "medians", "Size of copies, one session"


@dataclass(frozen=True, slots=True)
class Measure:
    """What is compared: a field of `Sample`, what it is called, and in which unit it is shown."""

    field: str
    name: str
    title: str
    unit: str
    factor: float


MEASURES = (
    Measure("bytes_per_s", "bandwidth", "Weights that come to the device", "GB/s", 1e-9),
    Measure("first_s", "first token", "Until every session has its first token", "ms", 1e3),
    Measure("tokens_per_s", "tokens/s", "Tokens per second, of all sessions together", "tokens/s", 1.0),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The model, its budget, and the fields of `WeightsPlan`. All servers are started for the run."""
    add_server_options(parser, kv=None, dtype=DTYPE)
    add_common(parser)
    parser.add_argument(
        "--budget",
        type=_budget,
        default=_budget(BUDGET),
        metavar="SIZE",
        help=f"weights on the device: bytes such as 90MiB, or a share of the model's (default: {BUDGET})",
    )
    parser.add_argument(
        "--sweep", action="store_true", help="measure Djinn alone, with copies of each size, and choose one"
    )
    parser.add_argument(
        "--chunks",
        type=_sizes,
        metavar="SIZE,SIZE,...",
        help="sizes of copies to choose from (default: 16MiB to 512MiB)",
    )
    add_plan_options(parser, WeightsPlan)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    plan, corpus = _plan(options), read_corpus(options)
    make_output(options)
    with _setup(options, plan) as setup:
        servers = setup.chunked_servers(plan) if options.sweep else setup.servers(plan)
        measured = run_sweep if options.sweep else run_weights
        report = run_on(servers, lambda specs: measured(specs, setup, plan, corpus, progress))
    return finish(report, options)


def _plan(options: argparse.Namespace) -> WeightsPlan:
    if options.chunks is not None and not options.sweep:
        raise LoadgenError("--chunks are for --sweep")
    if options.sweep:
        if options.cold or options.batches:
            raise LoadgenError("--sweep has one session, and weights in the page cache: leave --batches and --cold out")
        options.batches = (1,)
    more = {} if options.chunks is None else {"chunks": options.chunks}
    return read_plan(options, WeightsPlan, **more)


@contextmanager
def _setup(options: argparse.Namespace, plan: WeightsPlan) -> Iterator[Setup]:
    """What runs. Its scratch folder, where no memory poses as a disk, is gone at the end of the block."""
    settings = read_settings(options, kv_tokens=plan.kv_tokens)
    if settings.dtype == AUTO:
        raise LoadgenError(f"--dtype is {AUTO}, but the budget counts bytes: name {', '.join(ELEMENT_BYTES)}")
    size = read_model_bytes(settings.model, settings.dtype)
    budget = options.budget.of(size.total)
    if budget >= size.total:
        raise LoadgenError(f"--budget must be less than the {size.total} bytes of the model, not {budget}")
    peers_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weights-", dir=peers_folder()) as folder:
        yield Setup(settings, size, budget, Path(folder))


def _budget(text: str) -> Budget:
    try:
        return Budget(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(parse_bytes(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


async def run_weights(
    specs: Sequence[TargetSpec], setup: Setup, plan: WeightsPlan, corpus: Corpus, console: Console
) -> Report:
    """Compare. `specs` are the servers of `Setup.servers`; the programs run beside them.

    Raises `LoadgenError`, before the first sample, if a server cannot be measured. Cancelled during the run, it returns
    what was seen until then.
    """
    seen = Seen()
    steps = {str(cell): plan.repeats * len(cell.ways) for cell in plan.cells}
    async with _subjects(specs, plan) as (streamed, resident):
        bench = Bench(setup, plan, corpus, streamed, resident)
        with show_parts(console, "weights", steps) as advance, ending_early(seen), noting(RUN, seen.failures):
            await measure(bench, seen, lambda cell: advance(str(cell)))
    return _report(specs, setup, plan, corpus, seen, figures_of(plan, seen))


async def run_sweep(
    specs: Sequence[TargetSpec], setup: Setup, plan: WeightsPlan, corpus: Corpus, console: Console
) -> Report:
    """Find the size of copies; `specs` are the servers of `Setup.chunked_servers`. Raises as `run_weights` does."""
    seen = Seen()
    async with _subjects(specs, plan) as subjects:
        by_size = dict(zip(plan.chunks, subjects, strict=True))
        steps = {SIZES: plan.repeats * len(plan.chunks)}
        with show_parts(console, "weights", steps) as advance, ending_early(seen), noting(RUN, seen.failures):
            await measure_chunks(by_size, setup, plan, corpus, seen, lambda: advance(SIZES))
    return _report(specs, setup, plan, corpus, seen, [])


@asynccontextmanager
async def _subjects(specs: Sequence[TargetSpec], plan: WeightsPlan) -> AsyncIterator[list[Subject]]:
    """The servers, which have answered. Raises `LoadgenError`."""
    async with AsyncExitStack() as stack:
        subjects = [Subject(spec) for spec in specs]
        for subject in subjects:
            stack.push_async_callback(subject.close)
            try:
                await subject.prepare(plan.prompt + plan.tokens)
            except DjinnError as error:
                raise LoadgenError(f"measuring target {subject.spec.name} failed: {error}") from error
        yield subjects


def ratio(seen: Seen, cell: Cell, measure: str, beside: Way) -> Spread | None:
    """How many times as good as another way streamed Djinn is, repeat by repeat: above 1 it is ahead."""
    found = {(each.way, each.repeat): getattr(each, measure) for each in seen.samples if each.cell == cell}
    pairs = [(found.get((Way.STREAMED, n)), found.get((beside, n))) for n in sorted({n for _, n in found})]
    known = [(own, other) for own, other in pairs if own is not None and other is not None]
    return Spread.of(other / own if measure == "first_s" else own / other for own, other in known)


def figures_of(plan: WeightsPlan, seen: Seen) -> list[Figure]:
    """Every figure of a comparison, the bandwidth first.

    It is held against plain copies where copying is what takes the time: with the fewest sessions.
    """
    fewest = min(plan.batches)
    figures: list[Figure] = []
    for cell in (cell for cell in plan.cells if cell.batch == fewest):
        found = ratio(seen, cell, "bytes_per_s", Way.PLAIN)
        figures.append(Figure("bandwidth over that of plain copies", "×", found, OF_PLAIN, {"sessions": str(cell)}))
    for each in MEASURES:
        for way in (Way.ACCELERATE, Way.DOUBLE_BUFFER, Way.RESIDENT):
            for cell in plan.cells:
                judged = way is Way.ACCELERATE and each.field != "bytes_per_s"
                found = ratio(seen, cell, each.field, way)
                if found is not None or (judged and way in cell.ways):
                    name = f"{each.name}: times as good as {way}"
                    figures.append(Figure(name, "×", found, AHEAD if judged else None, {"sessions": str(cell)}))
    figures += _over_pass(plan, seen, fewest)
    for way in (Way.STREAMED, Way.DOUBLE_BUFFER, Way.ACCELERATE):
        for cell in (cell for cell in plan.cells if not cell.cold):
            said = {(e.way, e.repeat): e.answer for e in seen.samples if e.cell == cell and e.answer is not None}
            both = [n for who, n in said if who is way and (Way.RESIDENT, n) in said]
            same = sum(said[way, n] == said[Way.RESIDENT, n] for n in both)
            by, judged = {"sessions": str(cell)}, way is Way.STREAMED and cell == Cell(fewest)
            figure = all_of(f"answers of {way} that are those of {Way.RESIDENT}", same, len(both), by)
            # With more sessions it is chance who meets whom in a step, and others add in another order.
            if judged or both:
                figures.append(figure if judged else replace(figure, target=None))
    return figures


def _over_pass(plan: WeightsPlan, seen: Seen, fewest: int) -> Iterator[Figure]:
    """Streamed Djinn's time to the first token over that of plain copies of what it streams in a pass. On a GPU, where
    the prompt is computed in much less time than the weights take to come, it is held against a target.
    """
    streamed = seen.streamed_bytes.get(Way.STREAMED)
    for cell in plan.cells if streamed else ():
        found = {(e.way, e.repeat): e for e in seen.samples if e.cell == cell}
        over = Spread.of(
            each.first_s * plain.bytes_per_s / streamed  # type: ignore[operator]
            for (way, repeat), each in found.items()
            if way is Way.STREAMED and each.first_s is not None
            if (plain := found.get((Way.PLAIN, repeat))) is not None and plain.bytes_per_s is not None
        )
        target = OVER_PASS if seen.device == "cuda" and cell == Cell(fewest) else None
        if over is not None:
            yield Figure("first token over one pass of plain copies", "×", over, target, {"sessions": str(cell)})


def _report(
    specs: Sequence[TargetSpec], setup: Setup, plan: WeightsPlan, corpus: Corpus, seen: Seen, figures: Sequence[Figure]
) -> Report:
    settings, size = setup.settings, setup.model_bytes
    streamed: list[Row] = [{"": way.value, "bytes": in_bytes(count)} for way, count in seen.streamed_bytes.items()]
    note = "What a pass needs and the device does not keep."
    if seen.counted_bytes is not None:
        note += (
            f" By its own count, over the passes of one turn, Djinn streamed {in_bytes(seen.counted_bytes)} in each."
        )
    return Report(
        experiment="weights",
        title="A model larger than the device",
        lead=(
            f"{settings.model.name} in {settings.dtype}, {in_bytes(size.total)} of weights, of which the device may "
            f"have {in_bytes(setup.budget)}: {size.total / setup.budget:.1f} times less. {plan.prompt:,} tokens of "
            f"prompt in a batch ({corpus.name}), {plan.tokens} generated for each session, {plan.repeats} times in "
            "each way, in alternating order.",
        ),
        plan={**asdict(plan), "model": settings.model.name, "dtype": settings.dtype, "budget_bytes": setup.budget}
        | {"model_bytes": size.total, "bytes_per_pass": size.per_pass},
        figures=tuple(figures),
        tables=(
            _swept_table(seen),
            *(_measure_table(plan, seen, measure) for measure in MEASURES),
            Table("Weights streamed in a pass", streamed, note),
            Table(SAMPLES, [_row(each) for each in seen.samples] + [_row(e, n) for n, e in seen.chunks], shown=False),
            Table(MEDIANS, list(_median_rows(plan, seen)), shown=False),
        ),
        charts=(
            Chart(
                "Bandwidth against time to first token",
                "One session; medians. Each point is a size of copies: up and to the left is better.",
                "lines",
                SWEPT,
                "first token, ms",
                "GB/s",
                x_label="time to the first token, milliseconds",
                y_label="GB/s",
            ),
            *(
                Chart(
                    m.title,
                    "Medians.",
                    "bars",
                    MEDIANS,
                    "sessions",
                    m.field,
                    "way",
                    y_label=m.unit,
                )
                for m in MEASURES
            ),
        ),
        notes=(*NOTES, *((COLD,) if plan.cold else ()), *(f"{fact}." for fact in seen.facts)),
        servers=tuple(Server.of(spec) for spec in specs),
        texts=Texts.of(corpus),
        failures=tuple(seen.failures),
        interrupted=seen.interrupted,
    )


def _row(sample: Sample, chunk_bytes: int | None = None) -> Row:
    row = {"way": sample.way.value, "batch": sample.cell.batch, "cold": sample.cell.cold, "chunk_bytes": chunk_bytes}
    names = ("repeat", "first_s", "tokens_per_s", "bytes_per_s", "answer")
    return {**row, **{name: getattr(sample, name) for name in names}}


def _spread(samples: Sequence[Sample], measure: Measure) -> Spread | None:
    found = Spread.of(getattr(sample, measure.field) for sample in samples)
    return None if found is None else found.scaled(measure.factor)


def _measure_table(plan: WeightsPlan, seen: Seen, measure: Measure) -> Table:
    rows: list[Row] = []
    for way in Way:
        cells = {
            str(cell): _spread([each for each in seen.samples if (each.way, each.cell) == (way, cell)], measure)
            for cell in plan.cells
        }
        if any(cells.values()):
            shown = {name: None if found is None else Figure("", "", found).value for name, found in cells.items()}
            rows.append({"": way.value, **shown})
    return Table(f"{measure.title}, {measure.unit}", rows, "Median, and from lowest to highest of the repeats.")


def _median_rows(plan: WeightsPlan, seen: Seen) -> Iterator[Row]:
    for way in Way:
        for cell in plan.cells:
            mine = [each for each in seen.samples if (each.way, each.cell) == (way, cell)]
            found = {m.field: None if (s := _spread(mine, m)) is None else s.median for m in MEASURES}
            if mine:
                yield {"way": way.value, "sessions": str(cell), **found}


def _swept_table(seen: Seen) -> Table:
    """A row for each size of copies. Chosen is, of those whose bandwidth is near the best, the one with the earliest
    first token.
    """
    rows: list[dict[str, str | float | None]] = []
    for size in sorted({size for size, _ in seen.chunks}):
        mine = [each for found, each in seen.chunks if found == size]
        bandwidth, first, rate = (_spread(mine, measure) for measure in MEASURES)
        assert bandwidth is not None
        assert first is not None
        assert rate is not None
        shown = {"GB/s": bandwidth.median, "first token, ms": first.median, "tokens/s": rate.median}
        rows.append({"copies of": in_bytes(size), **shown, "choice": None})
    best = max((row["GB/s"] for row in rows), default=0.0)  # type: ignore[type-var]
    near = [row for row in rows if row["GB/s"] >= NEAR_BEST * best]  # type: ignore[operator]
    if near:
        min(near, key=lambda row: row["first token, ms"] or 0.0)["choice"] = "chosen"
    note = (
        f"Medians. Chosen: of the sizes with at least {NEAR_BEST:.0%} of the best bandwidth the earliest first token."
    )
    return Table(SWEPT, rows, note)


NOTES = (
    "What is timed. All prompts of a batch are sent at once. First token: until the last session has its first one; "
    "opening the sessions is not on the clock. Tokens per second: from then on until one session has its last. "
    "Bandwidth: what a pass needs of the weights and the device does not keep, times passes per second in that time. "
    "The sessions of a batch share out the same number of prompt tokens, so that all batches compute as much before "
    "their first tokens. Nothing of any prompt is in a cache.",
    "What it is compared with. All have the same prompts and the same budget, and run in turn in one run; only Djinn "
    "is asked over HTTP. Plain copies: one thread reads what the double buffer streams in a pass into two buffers in "
    "turn, over and over (on CUDA: copies it from pinned memory), and does nothing else. Double buffer: a decoder "
    "written by hand for one static batch, with two buffers of which one is filled while the other is computed with; "
    "the rest of the budget keeps whole layers, evenly spread. Accelerate: Transformers' generation, its offload.",
)
COLD = (
    f"Cold. While a cold sample is taken, all files of weights are dropped from the page cache every {PERIOD_S:g} s, "
    "so that every pass reads from the disk."
)
