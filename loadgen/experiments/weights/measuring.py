"""All samples of the comparison, one after the other, and the programs that Djinn is compared with."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from loadgen.errors import LoadgenError, NotAsMeant
from loadgen.experiments.weights.generation import Generation, ask_djinn
from loadgen.experiments.weights.page_cache import dropped
from loadgen.experiments.weights.plan import FEWEST_TOKENS, Cell, Sample, Setup, Way, WeightsPlan, in_turn
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, fresh_prompts
from loadgen.processes.line_process import LineProcess, line_process
from loadgen.report.failures import Failure, noting
from loadgen.targets.subject import Subject

PROGRAMS = {
    Way.DOUBLE_BUFFER: "loadgen.rivals.double_buffer",
    Way.ACCELERATE: "loadgen.rivals.offload.accelerate",
}
"""Modules, each of which `python -m` runs."""


class ProgramFailed(LoadgenError):
    """A program ended. The text says why."""


class Program:
    """A program that generates; `about` is what it says of itself. All raises `ProgramFailed` if it has ended."""

    def __init__(self, process: LineProcess, about: Mapping[str, Any]) -> None:
        self._process = process
        self.about = about

    async def generate(self, prompts: Sequence[TokenIds], tokens: int) -> Generation:
        """All prompts, which are of one length, as one static batch."""
        found = await self._process.ask({"prompts": prompts, "tokens": tokens})
        return Generation(found["token_ids"], [found["seconds"]] * len(prompts))

    async def copy(self, passes: int) -> float:
        """Bytes a second of copying what so many passes stream, of a program that can do that alone."""
        found = await self._process.ask({"passes": passes})
        rate: float = found["bytes"] / found["seconds"]
        return rate


@asynccontextmanager
async def running(way: Way, setup: Mapping[str, Any]) -> AsyncIterator[Program]:
    """The program of that way, ready to generate, until the block ends. Raises `ProgramFailed`."""
    async with line_process([sys.executable, "-m", PROGRAMS[way]], ProgramFailed) as process:
        yield Program(process, await process.ask(setup))


@dataclass(slots=True)
class Seen:
    """Everything seen, in order of time. It grows as the run goes on.

    `streamed_bytes`: what each way brings to the device in a pass. `counted_bytes`: the same of Djinn by its own count,
    over the passes of one turn. `device`: what kind the baselines ran on; `facts` are what else is to be known of them.
    """

    samples: list[Sample] = field(default_factory=list)
    chunks: list[tuple[int, Sample]] = field(default_factory=list)
    """Of a sweep, with the size of copies."""
    streamed_bytes: dict[Way, int] = field(default_factory=dict)
    counted_bytes: float | None = None
    device: str = ""
    facts: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    interrupted: bool = False


COPIED_PASSES = 4
"""Of plain copies in one sample."""


@dataclass(slots=True)
class Bench:
    """The servers, and the programs beside them as far as they have started."""

    setup: Setup
    plan: WeightsPlan
    corpus: Corpus
    streamed: Subject
    resident: Subject
    programs: dict[Way, Program] = field(default_factory=dict)

    async def prompts(self, batch: int) -> tuple[TokenIds, ...]:
        """Texts that no server here has computed yet."""
        length = self.plan.prompt_tokens(batch)
        return await fresh_prompts(batch, length, self.corpus, self.plan.seed, self.resident.tokenize)

    async def answer(self, way: Way, prompts: Sequence[TokenIds], tokens: int) -> Generation:
        """Have all of them answered. Raises `DjinnError`, `LoadgenError`."""
        match way:
            case Way.STREAMED:
                return await ask_djinn(self.streamed, prompts, tokens)
            case Way.RESIDENT:
                return await ask_djinn(self.resident, prompts, tokens)
            case _:
                return await self._program(way).generate(prompts, tokens)

    async def copy(self) -> float:
        """Bytes a second of plain copies. Raises `LoadgenError`."""
        return await self._program(Way.DOUBLE_BUFFER).copy(COPIED_PASSES)

    def _program(self, way: Way) -> Program:
        if way not in self.programs:
            raise NotAsMeant("it has not started")
        return self.programs[way]


async def measure(bench: Bench, seen: Seen, advance: Callable[[Cell], None]) -> None:
    """Take all samples; `advance` is told the cell of each. One that cannot be taken is a failure among the seen.

    Raises `DjinnError` and `LoadgenError` if nothing can be measured.
    """
    plan = bench.plan
    async with AsyncExitStack() as stack:
        for program in PROGRAMS:
            with noting(program, seen.failures):
                bench.programs[program] = await stack.enter_async_context(running(program, bench.setup.for_programs()))
        await _describe(bench, seen)
        await _warm_up(bench, seen)
        for repeat in range(plan.repeats):
            for place, cell in enumerate(plan.cells):
                prompts = await bench.prompts(cell.batch)
                for way in in_turn(cell.ways, repeat + place):
                    with noting(f"{way}, {cell}", seen.failures):
                        seen.samples.append(await _sample(bench, way, cell, repeat, prompts, seen))
                    advance(cell)


async def _describe(bench: Bench, seen: Seen) -> None:
    """What each way streams in a pass: Djinn what a pass needs and the device does not keep."""
    per_pass, tokens = bench.setup.model_bytes.per_pass, bench.plan.tokens
    before = (await bench.streamed.memory()).text
    await ask_djinn(bench.streamed, await bench.prompts(1), tokens)
    after = (await bench.streamed.memory()).text
    seen.counted_bytes = (after.streamed_bytes - before.streamed_bytes) / tokens
    seen.streamed_bytes = {Way.STREAMED: per_pass - after.kept_bytes}
    for way, program in bench.programs.items():
        seen.device, threads = program.about["device"], program.about["threads"]
        seen.streamed_bytes[way] = program.about.get("streamed_bytes", per_pass)
        origin = program.about.get("offload")
        seen.facts.append(
            f"{way}: {seen.device}, {threads} threads" + (f", weights offloaded to {origin}" if origin else "")
        )


async def _warm_up(bench: Bench, seen: Seen) -> None:
    """What is slow only once stays out of the samples."""
    for batch in bench.plan.batches:
        prompts = await bench.prompts(batch)
        for way in (Way.STREAMED, Way.RESIDENT, *bench.programs):
            with noting(f"{way}, warming up", seen.failures):
                await bench.answer(way, prompts, FEWEST_TOKENS)


async def _sample(bench: Bench, way: Way, cell: Cell, repeat: int, prompts: Sequence[TokenIds], seen: Seen) -> Sample:
    with ExitStack() as stack:
        if cell.cold:
            stack.enter_context(dropped(list(bench.setup.weight_files())))
        if way is Way.PLAIN:
            return Sample(way, cell, repeat, bytes_per_s=await bench.copy())
        generation = await bench.answer(way, prompts, bench.plan.tokens)
    timed = generation.timed()
    streamed = seen.streamed_bytes.get(way)
    return Sample(
        way,
        cell,
        repeat,
        first_s=timed.first_s,
        tokens_per_s=timed.tokens_per_s,
        bytes_per_s=None if streamed is None else streamed * timed.steps_per_s,
        answer=generation.fingerprint,
    )


async def measure_chunks(
    subjects: Mapping[int, Subject],
    setup: Setup,
    plan: WeightsPlan,
    corpus: Corpus,
    seen: Seen,
    advance: Callable[[], None],
) -> None:
    """How large copies should be: one session at a time on each server, by the size of its copies. The first round, in
    which what is slow only once happens, is not kept. Raises `DjinnError`, `LoadgenError` if nothing can be measured.
    """
    sizes = list(subjects)
    for repeat in range(-1, plan.repeats):
        for place in range(len(sizes)):
            size = sizes[(place + repeat) % len(sizes)]
            subject = subjects[size]
            with noting(f"copies of {size:,} bytes", seen.failures):
                prompts = await fresh_prompts(1, plan.prompt, corpus, plan.seed, subject.tokenize)
                timed = (await ask_djinn(subject, prompts, plan.tokens)).timed()
                streamed = setup.model_bytes.per_pass - (await subject.memory()).text.kept_bytes
                bandwidth = streamed * timed.steps_per_s
                if repeat >= 0:
                    found = Sample(Way.STREAMED, Cell(1), repeat, timed.first_s, timed.tokens_per_s, bandwidth)
                    seen.chunks.append((size, found))
            if repeat >= 0:
                advance()
