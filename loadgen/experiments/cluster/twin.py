"""What a single server says to the same prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from client import AsyncDjinn
from loadgen.experiments.soak.twin import Mirror, TwinFailed
from loadgen.load.corpus import Corpus
from loadgen.load.prompts import TokenIds, cut_prompts
from loadgen.load.trace import AgentPlan, Trace, final_tokens
from loadgen.load.workload import Load, Signals
from loadgen.targets import TargetSpec, connect
from loadgen.targets.subject import greedy

AT_ONCE = 8
"""Agents that the twin serves at a time."""

WARM_TOKENS = 4

Prompts = Sequence[Sequence[TokenIds]]
Answers = tuple[tuple[TokenIds, ...], ...]
"""By agent, then by turn."""


async def prompts_of(spec: TargetSpec, trace: Trace, load: Load, corpus: Corpus) -> Prompts:
    """What the agents say, in tokens of the server's model. Raises `LoadgenError`."""
    target = connect(spec, Signals.NONE)
    try:
        await target.prepare(final_tokens(trace))
        return await cut_prompts(trace, load, corpus, target.tokenize)
    finally:
        await target.close()


async def right_answers(
    url: str, trace: Trace, prompts: Prompts, timeout_s: float, told: Callable[[], None]
) -> Answers:
    """What the server at `url` answers to all turns of all agents; `told` is called after each turn.

    Raises `TwinFailed`.
    """
    free = asyncio.Semaphore(AT_ONCE)

    async def live(plan: AgentPlan, own: Sequence[TokenIds]) -> tuple[TokenIds, ...]:
        async with free, AsyncDjinn(url, timeout=timeout_s) as djinn:
            mirror, history, answers = Mirror(djinn), TokenIds(), list[TokenIds]()
            for turn, prompt in zip(plan.turns, own, strict=True):
                answers.append(await mirror.answer(history, prompt, turn.completion_tokens))
                history = (*history, *prompt, *answers[-1])
                told()
            await mirror.close()
            return tuple(answers)

    try:
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(live(plan, own)) for plan, own in zip(trace, prompts, strict=True)]
    except* TwinFailed as failed:
        raise failed.exceptions[0] from None
    return tuple(life.result() for life in lives)


async def warm_up(urls: Iterable[str], prompt: TokenIds, timeout_s: float) -> None:
    """Run a turn on each server that is not measured: what is slow only once stays out. Raises `DjinnError`."""
    for url in urls:
        async with AsyncDjinn(url, timeout=timeout_s) as djinn, await djinn.sessions.create() as session:
            await session.generate(**greedy(prompt, WARM_TOKENS))
