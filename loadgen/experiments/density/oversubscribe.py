"""`python -m loadgen oversubscribe`: a load of density whose histories outgrow the device, and what must hold then.

Some of its agents are answered once more, each alone: they must say what they said among all others.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from client import MemoryMap
from loadgen.errors import NotAsMeant, require_at_least
from loadgen.experiments.density.experiment import report_of, run_density
from loadgen.experiments.density.running import Attempt, Plan, Prompts
from loadgen.load.measurement import Measurement
from loadgen.load.prompts import TokenIds
from loadgen.load.records import Run
from loadgen.load.think import Uniform
from loadgen.load.trace import Trace, final_tokens
from loadgen.load.workload import Workload, plan_trace
from loadgen.options.common import add_common, finish, make_output, read_corpus
from loadgen.options.plan_fields import add_plan_options, read_plan
from loadgen.options.targets import add_targets, read_targets
from loadgen.plans import option
from loadgen.report.figures import Figure, Target, all_of, exact
from loadgen.targets import TargetSpec
from loadgen.targets.subject import Subject, greedy

DTYPE = "float32"
"""In which a session says the same beside others as alone: with the roundings of 16 bits, close calls go either way."""
SHARE = 4
"""A server that is started for the run holds one in so many of the tokens on its device."""
ALL_AT_ONCE = float("inf")
FULL: dict[str, Any] = {
    "agents": 32,
    "rate": ALL_AT_ONCE,
    "context": 240,
    "turns": 4,
    "resume_tokens": 240,
    "completion_tokens": 16,
    "think": Uniform(1.0, 3.0),
    "system_tokens": 0,
}
"""Histories of 1,024 tokens."""
QUICK: dict[str, Any] = {"agents": 16, "context": 80, "turns": 3, "resume_tokens": 76, "completion_tokens": 8}


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """`checked` of the agents are answered once more, each alone."""

    checked: int = option(4, "agents that are answered once more, alone", quick=2)

    def __post_init__(self) -> None:
        require_at_least(0, self, "checked")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The targets, and the fields of `Workload` with other defaults."""
    add_targets(parser, kv=None, dtype=DTYPE)
    add_common(parser)
    add_plan_options(parser, Workload, **FULL)
    add_plan_options(parser, CheckPlan)


def run(options: argparse.Namespace, progress: Console) -> int:
    """Run it, print the figures and write the results; returns the exit code. Raises `LoadgenError`."""
    load = read_plan(options, Workload, **{**FULL, **(QUICK if options.quick else {})})
    checks, corpus = read_plan(options, CheckPlan), read_corpus(options)
    plan = Plan(load, plan_trace(load), corpus, Measurement())
    longest = final_tokens(plan.trace)
    targets = read_targets(options, kv_tokens=max(load.agents // SHARE, 2) * longest)
    make_output(options)

    async def after(spec: TargetSpec, attempt: Attempt) -> tuple[Figure, ...]:
        subject = Subject(spec)
        try:
            memory = await subject.memory()
            same = await check_alone(subject, attempt.prompts, attempt.run, checks.checked)
        finally:
            await subject.close()
        return (
            *judge(spec.name, plan.trace, attempt.run, memory),
            all_of("tokens that are the same when the session is alone", *same, {"target": spec.name}),
        )

    found = asyncio.run(run_density(targets, plan, progress, after))
    report = report_of(plan, found, "oversubscribe", "More sessions than the device holds")
    return finish(replace(report, plan={**report.plan, "checked": checks.checked}), options)


def judge(target: str, trace: Trace, run: Run, memory: MemoryMap) -> tuple[Figure, ...]:
    """What must hold of a server whose sessions have outgrown its device."""
    data, by = memory.data, {"target": target}
    most = most_tokens(run, trace)
    demand = -(-most // data.block_tokens) * data.block_bytes
    used = max((sample.bytes.get("device", 0) for sample in run.samples), default=0)
    fits = memory.policy != "none" and demand <= data.host.total_bytes + data.disk.total_bytes
    recomputed = sum(turn.cost.recomputed_tokens or 0 for turn in run.turns)
    return (
        exact(
            "KV of all histories, over what the device holds",
            "×",
            demand / data.device.total_bytes,
            Target(1.0, at_least=True),
            by,
        ),
        exact("most KV of sessions on the device, of its room", "×", used / data.device.total_bytes, Target(1.0), by),
        exact("tokens recomputed", "", recomputed, Target(0) if fits else None, by),
    )


def most_tokens(run: Run, trace: Trace) -> int:
    """The most tokens that the histories of all agents had at once: each has its own until its last turn is over."""
    lasts = [len(agent.turns) - 1 for agent in trace]
    changes: list[tuple[float, int]] = []
    for turn in run.turns:
        length = turn.cost.prompt_tokens + turn.cost.completion_tokens
        before = next((t for t in run.turns if (t.agent, t.turn) == (turn.agent, turn.turn - 1)), None)
        known = 0 if before is None else before.cost.prompt_tokens + before.cost.completion_tokens
        changes.append((turn.over_s, length - known))
        if turn.turn == lasts[turn.agent]:
            changes.append((turn.over_s + 1e-6, -length))
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most


async def check_alone(subject: Subject, prompts: Prompts, run: Run, count: int) -> tuple[int, int]:
    """How many tokens of so many agents, evenly spread, are the same alone, and of how many. Raises `DjinnError`,
    `NotAsMeant`.

    Each is answered again, turn by turn, as far as it came. The session multiplies its residual stream by 1, which
    changes nothing, but keeps it apart from the prefix cache: KV that was computed with an edit is shared only with
    sessions that made the same. So all of its KV is computed from scratch.
    """
    await subject.prepare(1)
    right = whole = 0
    for place in range(min(count, len(prompts))):
        agent = place * len(prompts) // min(count, len(prompts))
        turns = sorted((turn for turn in run.turns if turn.agent == agent), key=lambda turn: turn.turn)
        answers = await _answers(subject, prompts[agent][: len(turns)], [turn.cost.completion_tokens for turn in turns])
        for turn, alone in zip(turns, answers, strict=True):
            crowded = turn.cost.token_ids
            right += sum(one == other for one, other in zip(crowded, alone, strict=False))
            whole += max(len(crowded), len(alone))
    return right, whole


async def _answers(subject: Subject, prompts: Sequence[TokenIds], tokens: Sequence[int]) -> list[TokenIds]:
    answers = []
    async with subject.session() as session:
        await session.steer(layer=0, scale=1.0)
        for place, (prompt, count) in enumerate(zip(prompts, tokens, strict=True)):
            turn = await session.generate(**greedy(prompt, count))
            if not place and turn.usage.cached_tokens:
                raise NotAsMeant(f"{turn.usage.cached_tokens} tokens of a fresh session came from the prefix cache")
            answers.append(turn.token_ids)
    return answers
