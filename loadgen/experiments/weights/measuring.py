"""All samples of the comparison, one after the other."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

from loadgen.errors import NotAsMeant
from loadgen.experiments.weights.findings import Findings, Sample, Way
from loadgen.experiments.weights.generation import Generation, ask_djinn
from loadgen.experiments.weights.page_cache import dropped
from loadgen.experiments.weights.plan import FEWEST_TOKENS, Cell, WeightsPlan, order_of_ways, ways_of
from loadgen.experiments.weights.programs import PROGRAMS, Program, running
from loadgen.experiments.weights.setup import Setup
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, fresh_prompts
from loadgen.results.failures import noting
from loadgen.targets.subject import Subject

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


async def measure(bench: Bench, findings: Findings, advance: Callable[[Cell], None]) -> None:
    """Take all samples; `advance` is told the cell of each. One that cannot be taken is a failure among the findings.

    Raises `DjinnError` and `LoadgenError` if nothing can be measured.
    """
    plan, ways = bench.plan, [Way.STREAMED, Way.RESIDENT, *PROGRAMS, Way.PLAIN]
    async with AsyncExitStack() as stack:
        for program in PROGRAMS:
            with noting(program, findings.failures):
                bench.programs[program] = await stack.enter_async_context(running(program, bench.setup.for_programs()))
        await _describe(bench, findings)
        await _warm_up(bench, findings)
        for repeat in range(plan.repeats):
            for place, cell in enumerate(plan.cells):
                prompts = await bench.prompts(cell.batch)
                for way in order_of_ways(ways_of(cell, ways), repeat, place):
                    with noting(f"{way}, {cell}", findings.failures):
                        findings.samples.append(await _sample(bench, way, cell, repeat, prompts, findings))
                    advance(cell)


async def _describe(bench: Bench, findings: Findings) -> None:
    """What each way streams in a pass: Djinn what a pass needs and the device does not keep."""
    per_pass, tokens = bench.setup.model_bytes.per_pass, bench.plan.tokens
    before = (await bench.streamed.memory()).text
    await ask_djinn(bench.streamed, await bench.prompts(1), tokens)
    after = (await bench.streamed.memory()).text
    findings.counted_bytes = (after.streamed_bytes - before.streamed_bytes) / tokens
    findings.streamed_bytes = {Way.STREAMED: per_pass - after.kept_bytes}
    for way, program in bench.programs.items():
        findings.device, threads = program.about["device"], program.about["threads"]
        findings.streamed_bytes[way] = program.about.get("streamed_bytes", per_pass)
        origin = program.about.get("offload")
        findings.facts.append(
            f"{way}: {findings.device}, {threads} threads" + (f", weights offloaded to {origin}" if origin else "")
        )


async def _warm_up(bench: Bench, findings: Findings) -> None:
    """What is slow only once stays out of the samples."""
    for batch in bench.plan.batches:
        prompts = await bench.prompts(batch)
        for way in (Way.STREAMED, Way.RESIDENT, *bench.programs):
            with noting(f"{way}, warming up", findings.failures):
                await bench.answer(way, prompts, FEWEST_TOKENS)


async def _sample(
    bench: Bench, way: Way, cell: Cell, repeat: int, prompts: Sequence[TokenIds], findings: Findings
) -> Sample:
    with ExitStack() as stack:
        if cell.cold:
            stack.enter_context(dropped(list(bench.setup.weight_files())))
        if way is Way.PLAIN:
            return Sample(way, cell.batch, cell.cold, repeat, bytes_per_s=await bench.copy())
        generation = await bench.answer(way, prompts, bench.plan.tokens)
    timed = generation.timed()
    streamed = findings.streamed_bytes.get(way)
    return Sample(
        way,
        cell.batch,
        cell.cold,
        repeat,
        first_s=timed.first_s,
        tokens_per_s=timed.tokens_per_s,
        bytes_per_s=None if streamed is None else streamed * timed.steps_per_s,
        answer=generation.fingerprint,
    )
