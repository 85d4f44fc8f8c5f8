"""All samples of one target, one after the other."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from loadgen.experiments.resume_latency.away import Passers, passer_lengths, passers
from loadgen.experiments.resume_latency.findings import Findings, Sample, Way
from loadgen.experiments.resume_latency.histories import Histories, cut_histories
from loadgen.experiments.resume_latency.offload import HandWrittenOffload, Shape, hand_written_offload
from loadgen.experiments.resume_latency.plan import Cell, ResumePlan, choose_layers, order_of_ways, plan_cells
from loadgen.experiments.resume_latency.ways import arm, call_back, pause_at, recompute
from loadgen.load.corpus import Corpus
from loadgen.results.failures import noting
from loadgen.targets.subject import Subject


@dataclass(frozen=True, slots=True)
class Prepared:
    """A server that has answered, and how long the sessions must be that fill its device."""

    subject: Subject
    passer_lengths: list[int]


@dataclass(frozen=True, slots=True)
class Bench:
    """A server, and what is beside it during the run."""

    subject: Subject
    layers: tuple[int, ...]
    histories: Histories
    passers: Passers
    offload: HandWrittenOffload


async def prepare(subject: Subject, plan: ResumePlan) -> Prepared:
    """Ask what the server runs. Raises `DjinnError`, and `LoadgenError` if it cannot serve the experiment."""
    longest = max(plan.lengths)
    await subject.prepare(longest + 1)
    memory = await subject.memory()
    lengths = passer_lengths(memory, subject.spec.name, longest=longest, max_model_len=subject.max_model_len)
    return Prepared(subject, lengths)


async def measure(
    prepared: Prepared,
    plan: ResumePlan,
    model: Path | None,
    corpus: Corpus,
    findings: Findings,
    advance: Callable[[int], None],
) -> None:
    """Take all samples; `advance` is told the length of each. Raises `DjinnError` if nothing can be measured; one
    sample that cannot be taken is a failure among the findings.
    """
    subject = prepared.subject
    layers = choose_layers(subject.num_layers, plan.depths)
    histories = await cut_histories(subject, plan, layers, prepared.passer_lengths, corpus)
    async with AsyncExitStack() as stack:
        dtype = await _warm_up(subject, layers[0], histories, findings)
        offload = await stack.enter_async_context(hand_written_offload())
        with noting(Way.OFFLOAD.value, findings.failures):
            shape = Shape.of(await subject.memory(), await subject.model(), dtype, model)
            findings.offload = await offload.describe(shape)
        passing_by = await stack.enter_async_context(passers(subject, histories.passers))
        await _take_samples(Bench(subject, layers, histories, passing_by, offload), plan, findings, advance)


async def _warm_up(subject: Subject, layer: int, histories: Histories, findings: Findings) -> str:
    """Run one turn of each length too many: what is slow only once stays out of the samples. Returns the dtype."""
    dtype = ""
    for length, history in histories.warm_up.items():
        async with subject.session() as session:
            await arm(session, history, layer)
            checkpoint = (await pause_at(session, history, layer)).checkpoint
            assert checkpoint is not None
            findings.passes[length], dtype = checkpoint.first, checkpoint.dtype
    return dtype


async def _take_samples(bench: Bench, plan: ResumePlan, findings: Findings, advance: Callable[[int], None]) -> None:
    """Length by length, so that the script holds one session at a time; within a length the ways take turns."""
    for length in plan.lengths:
        with noting(Way.OFFLOAD.value, findings.failures):
            await bench.offload.prepare(bench.histories.offload[length], findings.passes[length], bench.layers)
        for repeat in range(plan.repeats):
            for place, cell in enumerate(plan_cells([length], bench.layers)):
                for way in order_of_ways(tuple(Way), repeat, place):
                    with noting(f"{way.value}, {length:,} tokens", findings.failures):
                        findings.samples.append(await _take_sample(bench, way, cell, repeat))
                    advance(length)


async def _take_sample(bench: Bench, way: Way, cell: Cell, repeat: int) -> Sample:
    first, second, third = bench.histories.samples[repeat, cell]
    match way:
        case Way.RECOMPUTE:
            return await recompute(bench.subject, cell, repeat, (first, second))
        case Way.OFFLOAD:
            return await bench.offload.restore(cell, repeat)
        case Way.DJINN:
            return await call_back(bench.subject, bench.passers, cell, repeat, third)
