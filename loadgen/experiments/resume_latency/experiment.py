"""`python -m loadgen resume-latency`: how long it takes to be back where a session was: recomputed, brought back by
hand, and brought back by Djinn.

A session is paused between two layers and leaves the device. Each way back is timed in turn, from outside, until the
model stands there again with all KV in place, and until the next token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from loadgen.experiments.base import Bench, DjinnExperiment, Found
from loadgen.experiments.resume_latency.away import SPARE_TOKENS, Passers, passer_lengths, passers
from loadgen.experiments.resume_latency.offload import HandWrittenOffload, Shape, hand_written_offload
from loadgen.experiments.resume_latency.plan import (
    Cell,
    ResumePlan,
    Sample,
    Way,
    checked_cells,
    choose_layers,
    depth_of,
    plan_cells,
)
from loadgen.experiments.resume_latency.ways import arm, call_back, pause_at, recompute
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, cut_prompts
from loadgen.load.trace import AgentPlan, TurnPlan
from loadgen.load.workload import Load
from loadgen.options.servers import read_settings
from loadgen.report.charts import Chart
from loadgen.report.failures import ending_early, noting
from loadgen.report.figures import Figure, Spread, Target, all_of
from loadgen.report.progress import show_parts
from loadgen.report.tables import Row, Table
from loadgen.targets.subject import Subject

PER_SAMPLE = 3
"""Histories of one cell in one repeat: two are recomputed, one is called back."""
SOONER = Target(1.0, at_least=True)
MEASURES = {"standing_s": "the model stands again", "token_s": "the next token"}
"""What is waited for, by the field of `Sample`."""
SAMPLES, MEDIANS = "samples", "medians"


@dataclass(frozen=True, slots=True)
class Stage:
    """A server, what its sessions are sent, and what is beside it during the run.

    `offload_histories` has for each length what the hand-written offload holds.
    """

    subject: Subject
    layers: tuple[int, ...]
    histories: dict[tuple[int, Cell], tuple[TokenIds, TokenIds, TokenIds]]
    offload_histories: dict[int, TokenIds]
    passers: Passers
    offload: HandWrittenOffload


async def prepare(bench: Bench[ResumePlan]) -> list[int]:
    """How long sessions must be that fill the device. Raises `DjinnError`, and `LoadgenError` if the server cannot
    serve the experiment.
    """
    _model(bench.options)
    subject, longest = bench.subject, max(bench.plan.lengths)
    await subject.prepare(longest + 1)
    memory = await subject.memory()
    return passer_lengths(memory, subject.spec.name, longest=longest, max_model_len=subject.max_model_len)


async def measure(bench: Bench[ResumePlan], passing: list[int], found: Found) -> None:
    """Take all samples, and say what they come to."""
    plan, subject = bench.plan, bench.subject
    layers = choose_layers(subject.num_layers, plan.depths)
    per_length = plan.repeats * len(layers) * len(Way)
    parts = {length: f"{length:,} tokens" for length in plan.lengths}
    samples: list[Sample] = []
    with (
        show_parts(bench.console, subject.spec.name, dict.fromkeys(parts.values(), per_length)) as advance,
        ending_early(found),
        noting("the run", found.failures),
    ):
        await _take_all(bench, layers, passing, samples, found, lambda length: advance(parts[length]))
    found.figures += _figures(plan, layers, samples, per_length * len(plan.lengths))
    found.tables += _tables(layers, samples, subject.num_layers)
    found.charts += _charts()


async def _take_all(
    bench: Bench[ResumePlan],
    layers: tuple[int, ...],
    passing: Sequence[int],
    samples: list[Sample],
    found: Found,
    advance: Callable[[int], None],
) -> None:
    """One sample that cannot be taken is a failure. Raises `DjinnError` if nothing can be measured."""
    plan, subject, model = bench.plan, bench.subject, _model(bench.options)
    cells = plan_cells(plan.lengths, layers)
    # All differ from their first token on, so that no prefix cache helps.
    wanted = [
        *passing,
        *plan.lengths,
        *(c.length for _ in range(plan.repeats) for c in cells for _ in range(PER_SAMPLE)),
    ]
    trace = tuple(AgentPlan(0.0, (TurnPlan(length, 1, None, None, tool=False),)) for length in wanted)
    load = Load(system_tokens=0, seed=plan.seed)
    cut = iter([turns[0] for turns in await cut_prompts(trace, load, bench.corpus, subject.tokenize)])
    for_passers = [next(cut) for _ in passing]
    warm_up = {length: next(cut) for length in plan.lengths}
    histories = {(repeat, cell): (next(cut), next(cut), next(cut)) for repeat in range(plan.repeats) for cell in cells}
    # In the first repeat of a cell where answers are compared, the session that is called back has the offload's
    # history.
    shared = {cell.length: histories[0, cell][-1] for cell in checked_cells(plan.lengths, layers)}
    async with AsyncExitStack() as stack:
        firsts, dtype = await _warm_up(subject, layers[0], warm_up)
        offload = await stack.enter_async_context(hand_written_offload())
        with noting(Way.OFFLOAD.value, found.failures):
            shape = Shape.of(await subject.memory(), await subject.model(), dtype, model)
            found.notes.append(f"The hand-written offload ran on {await offload.describe(shape)}.")
        parted = ", ".join(f"{first:,} of {length:,} tokens" for length, first in firsts.items() if first)
        if parted:
            found.notes.append(
                "The server computes long histories in parts; only the last one pauses, and the positions before it "
                f"({parted}) have KV of all layers in every way."
            )
        passing_by = await stack.enter_async_context(passers(subject, for_passers))
        stage = Stage(subject, layers, histories, shared, passing_by, offload)
        for length in plan.lengths:  # one after the other, so that the script holds one session at a time
            with noting(Way.OFFLOAD.value, found.failures):
                await offload.prepare(stage.offload_histories[length], firsts[length], layers)
            for repeat in range(plan.repeats):
                for place, cell in enumerate(plan_cells([length], layers)):
                    for way in _order(repeat + place):
                        with noting(f"{way.value}, {length:,} tokens", found.failures):
                            samples.append(await _take(stage, way, cell, repeat))
                        advance(length)


def _model(options: argparse.Namespace) -> Path | None:
    """What the hand-written offload goes on with to the next token: what a running server runs is known only if the
    user said it.
    """
    managed = any("://" not in target for target in options.target)
    return read_settings(options).model if managed or options.model is not None else None


async def _warm_up(subject: Subject, layer: int, histories: dict[int, TokenIds]) -> tuple[dict[int, int], str]:
    """Run one turn of each length too many: what is slow only once stays out of the samples.

    Returns the first position of the pass that pauses, by length, and the dtype of activations.
    """
    firsts, dtype = {}, ""
    for length, history in histories.items():
        async with subject.session() as session:
            await arm(session, history, layer)
            checkpoint = (await pause_at(session, history, layer)).checkpoint
            assert checkpoint is not None
            firsts[length], dtype = checkpoint.first, checkpoint.dtype
    return firsts, dtype


def _order(turn: int) -> tuple[Way, ...]:
    """Each way is first as often as the others, so that what drifts falls on all alike."""
    ways = tuple(Way)
    return (*ways[turn % len(ways) :], *ways[: turn % len(ways)])


async def _take(stage: Stage, way: Way, cell: Cell, repeat: int) -> Sample:
    first, second, third = stage.histories[repeat, cell]
    match way:
        case Way.RECOMPUTE:
            return await recompute(stage.subject, cell, repeat, (first, second))
        case Way.OFFLOAD:
            return await stage.offload.restore(cell, repeat)
        case Way.DJINN:
            return await call_back(stage.subject, stage.passers, cell, repeat, third)


def ratios(samples: Sequence[Sample], cell: Cell, measure: str, over: Way, under: Way) -> Spread | None:
    """How many times as long one way takes as another, of the repeats that have both."""
    found = {(each.way, each.repeat): getattr(each, measure) for each in samples if each.cell == cell}
    pairs = [(found.get((over, repeat)), found.get((under, repeat))) for repeat in {repeat for _, repeat in found}]
    return Spread.of(one / other if one is not None and other else None for one, other in pairs)


def _figures(plan: ResumePlan, layers: Sequence[int], samples: Sequence[Sample], planned: int) -> Iterator[Figure]:
    for length in plan.lengths:
        by = {"tokens": f"{length:,}"}
        for measure, words in MEASURES.items():
            for layer in layers:
                place = {**by, "layer": f"{layer}"}
                cell = Cell(length, layer)
                target = SOONER if measure == "standing_s" else None
                sooner = ratios(samples, cell, measure, Way.RECOMPUTE, Way.DJINN)
                if sooner is not None:
                    yield Figure(f"recompute over Djinn, until {words}", "×", sooner, target, place)
                beside = ratios(samples, cell, measure, Way.DJINN, Way.OFFLOAD)
                if beside is not None:
                    yield Figure(f"Djinn over the hand-written offload, until {words}", "×", beside, by=place)
    said = {(s.way, s.cell): s.token_id for s in samples if s.repeat == 0 and s.token_id is not None}
    checked = [
        (said[Way.DJINN, cell], said[Way.OFFLOAD, cell])
        for cell in checked_cells(plan.lengths, layers)
        if (Way.DJINN, cell) in said and (Way.OFFLOAD, cell) in said
    ]
    yield all_of("next tokens that are those of Transformers", sum(a == b for a, b in checked), len(checked))
    away = sum(sample.way is Way.DJINN for sample in samples)
    whole = planned // len(Way)
    yield all_of("samples of Djinn whose KV had left the device, and of which nothing was recomputed", away, whole)


def _tables(layers: Sequence[int], samples: Sequence[Sample], num_layers: int) -> Iterator[Table]:
    medians: list[Row] = []
    times: dict[str, list[Row]] = {measure: [] for measure in MEASURES}
    clocks: list[Row] = []
    for cell in dict.fromkeys(sample.cell for sample in samples):
        mine = [sample for sample in samples if sample.cell == cell]
        place: Row = {
            "tokens": f"{cell.length:,}",
            "layer": cell.layer,
            "depth": f"{depth_of(cell.layer, num_layers):.0f} %",
        }
        for measure in MEASURES:
            row = dict(place)
            for way in Way:
                spread = Spread.of(getattr(sample, measure) for sample in mine if sample.way is way)
                row[way.value] = None if spread is None else Figure("", "", spread.scaled(1e3)).value
                if spread is not None:
                    name = f"{way.value}, {cell.length:,} tokens"
                    depth = depth_of(cell.layer, num_layers)
                    medians.append({"way": name, "measure": measure, "depth": depth, "ms": 1e3 * spread.median})
            times[measure].append(row)
        parts = {"dispatch": "dispatch_s", "KV": "copy_s", "residual stream": "checkpoint_s"}
        told = {name: Spread.of(getattr(each, field) for each in mine) for name, field in parts.items()}
        found = {name: None if s is None else Figure("", "", s.scaled(1e3)).value for name, s in told.items()}
        if any(found.values()):
            clocks.append({**place, **found})
    for measure, words in MEASURES.items():
        yield Table(f"Milliseconds until {words}", times[measure], "Median, and lowest to highest of the repeats.")
    note = (
        "Dispatch: the engine takes the resume. KV: the copy from the host tier. Residual stream: the checkpoint on "
        "its way back."
    )
    yield Table("By the server's own clocks, milliseconds of a resume from the host tier", clocks, note)
    yield Table(SAMPLES, [_row(sample) for sample in samples], shown=False)
    yield Table(MEDIANS, sorted(medians, key=lambda row: str(row["way"])), shown=False)


def _row(sample: Sample) -> Row:
    found = asdict(sample)
    return {
        "way": sample.way.value,
        **found.pop("cell"),
        **{name: each for name, each in found.items() if name != "way"},
    }


def _charts() -> Iterator[Chart]:
    for measure, words in MEASURES.items():
        yield Chart(
            f"Until {words}",
            "Medians. Where Djinn's line is below that of a recompute of the same length, coming back is sooner.",
            "lines",
            MEDIANS,
            "depth",
            "ms",
            "way",
            {"measure": measure},
            "depth of the pause, % of layers",
            "milliseconds",
            log_y=True,
        )


NOTES = (
    "Recompute. A fresh session is sent the whole history. Stands again: from the request until the answer that it is "
    "paused after the layer. Next token: another fresh session without a pause, from the request to the first token. "
    "Neither the opening of a session nor the arming of the breakpoint is on the clock; no prefix is in a cache.",
    "Hand-written offload. A separate script, with one session and without HTTP. Stands again: it copies the KV that "
    "the layers up to the pause have from one buffer in host memory (pinned where there is CUDA) to one on the "
    "device, and the residual stream, until both have arrived. Next token: then Transformers takes the residual "
    "stream through the layers that are left.",
    "Djinn. The paused session is in the host tier, and others have taken its place on the device. Stands again: "
    "from sending `ready` until the server, which is polled, says that all KV is on the device; the time in which "
    "the residual stream comes back is added, by the server's clock. Next token: from sending `resume`, unannounced, "
    "to the first token. All KV that the session has comes back, in blocks. Blocks of the pass that has paused have "
    "the layers that it has run.",
)


def _lead(plan: ResumePlan, corpus: Corpus) -> str:
    lengths, depths = (", ".join(f"{each:,g}" for each in every) for every in (plan.lengths, plan.depths))
    return (
        f"Sessions of {lengths} tokens of real text ({corpus.name}), paused at {depths} % of the layers, "
        f"{plan.repeats} times in each way, in alternating order."
    )


RESUME_LATENCY = DjinnExperiment(
    "resume-latency",
    "Coming back to where it was",
    ResumePlan,
    _lead,
    prepare,
    measure,
    kv=None,
    kv_tokens=lambda plan: max(plan.lengths) + SPARE_TOKENS,
    notes=NOTES,
    read_elsewhere=("model",),
)
