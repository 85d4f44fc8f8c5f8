"""Whether a session goes on elsewhere as if it had never moved, and what the move costs beside computing it anew."""

import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from client import DjinnError
from loadgen.errors import LoadgenError
from loadgen.experiments.migrate.journey import Said, travel
from loadgen.experiments.migrate.plan import MigratePlan
from loadgen.experiments.migrate.report import Findings, MigrateReport, summarize
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import fresh_prompts
from loadgen.results.failures import ending_early, noting
from loadgen.results.inputs import Server, Texts
from loadgen.results.progress import show_parts
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject


@dataclass(frozen=True, slots=True)
class Prepared:
    """Two servers that have answered, and for each length what each session says."""

    origin: Subject
    goal: Subject
    said: dict[int, tuple[Said, ...]]


async def run_migrate(
    origin: TargetSpec, goal: TargetSpec, plan: MigratePlan, corpus: Corpus, console: Console
) -> MigrateReport:
    """Move sessions from `origin` to `goal`. Raises `LoadgenError`, before the first move, if one cannot serve it.

    Cancelled during a run, it returns what was seen until then.
    """
    findings = Findings()
    async with AsyncExitStack() as stack:
        subjects = Subject(origin), Subject(goal)
        for subject in subjects:
            stack.push_async_callback(subject.close)
        prepared = await _prepare(*subjects, plan, corpus)
        parts = {_part(length): plan.repeats for length in plan.lengths}
        with show_parts(console, f"{origin.name} to {goal.name}", parts) as advance, ending_early(findings):
            await _move_all(prepared, plan, findings, advance)
    return MigrateReport(
        seed=plan.seed,
        plan=plan,
        texts=Texts.of(corpus),
        origin=Server.of(origin),
        goal=Server.of(goal),
        findings=findings,
        costs=summarize(findings.journeys),
    )


async def _prepare(origin: Subject, goal: Subject, plan: MigratePlan, corpus: Corpus) -> Prepared:
    """Cut texts, and run a turn on both: what is slow only once stays out of the measurement."""
    subject = origin
    said = {}
    try:
        for subject in (goal, origin):
            await subject.prepare(plan.longest)
        for length in plan.lengths:
            said[length] = await _cut(origin, plan, corpus, length)
        for subject in (goal, origin):
            spare = await subject.tokenize("Nobody else says this.", True)
            await subject.answer(spare, plan.decoded)
    except DjinnError as error:
        raise LoadgenError(f"measuring target {subject.spec.name} failed: {error}") from error
    return Prepared(origin, goal, said)


async def _cut(origin: Subject, plan: MigratePlan, corpus: Corpus, length: int) -> tuple[Said, ...]:
    """Two texts for each session."""
    tokens = length + plan.new_tokens
    texts = await fresh_prompts(2 * plan.repeats, tokens, corpus, plan.seed, origin.tokenize)
    return tuple(
        Said(history=text[:length], new=text[length:], other=other)
        for text, other in zip(texts[::2], texts[1::2], strict=True)
    )


async def _move_all(prepared: Prepared, plan: MigratePlan, findings: Findings, advance: Callable[[str], None]) -> None:
    """Length after length. The first move that fails ends its length: the others would fail in the same way."""
    with tempfile.TemporaryDirectory(prefix="loadgen-migrate-") as folder:
        for length, sessions in prepared.said.items():
            with noting(_part(length), findings.failures):
                for repeat, said in enumerate(sessions):
                    file = Path(folder) / f"{length}-{repeat}.safetensors"
                    journey = await travel(prepared.origin, prepared.goal, said, plan.decoded, repeat, file)
                    findings.journeys.append(journey)
                    file.unlink()
                    advance(_part(length))


def _part(length: int) -> str:
    return f"{length:,} tokens"
