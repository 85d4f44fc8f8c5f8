"""What steering does to what is said, and what it and breakpoints that never match do to the speed."""

from collections.abc import Callable

from client import AsyncSession, DjinnError
from loadgen.experiments.whitebox.bench import Bench
from loadgen.experiments.whitebox.findings import Arm, Rates, Steered
from loadgen.load.prompts import TokenIds
from loadgen.load.stopwatch import Stopwatch
from loadgen.targets.subject import Subject, greedy


class Unmeasurable(DjinnError):
    """The server was faster than can be told."""


async def run_steered(bench: Bench, advance: Callable[[], None]) -> None:
    """Answer the prompts of the first layer's trials once more for each layer, multiplied there by `plan.scale`."""
    subject, plan = bench.subject, bench.plan
    plain = [await subject.answer(prompt, plan.tokens) for prompt in bench.prompts[: plan.sequences]]
    for layer in bench.layers:
        for sequence, expected in enumerate(plain):
            async with subject.session() as session:
                await session.steer(layer=layer, scale=plan.scale)
                turn = await session.generate(**greedy(bench.prompts[sequence], plan.tokens))
            bench.findings.steered.append(Steered(layer, sequence, first_difference(expected, turn.token_ids)))
            advance()


def first_difference(expected: TokenIds, found: TokenIds) -> int | None:
    """Where the two part, None if they are the same."""
    if expected == found:
        return None
    same = (one == other for one, other in zip(expected, found, strict=False))
    return next((place for place, equal in enumerate(same) if not equal), min(len(expected), len(found)))


async def measure_rates(bench: Bench, advance: Callable[[], None]) -> None:
    """Decode with each `Arm` in turn, `plan.sequences` times, each time beginning with another one."""
    subject, plan, arms = bench.subject, bench.plan, tuple(Arm)
    for number in range(plan.sequences):
        first = number % len(arms)
        rates = {}
        for arm in (*arms[first:], *arms[:first]):
            async with subject.session() as session:
                await _arm(subject, session, arm, bench.middle_layer, plan.scale)
                rates[arm] = await _decode_rate(session, bench.prompts[0], plan.tokens)
        bench.findings.rates.append(Rates(rates))
        advance()


async def _arm(subject: Subject, session: AsyncSession, arm: Arm, layer: int, scale: float) -> None:
    if arm is Arm.STEERED:
        await session.steer(layer=layer, scale=scale)
    elif arm is Arm.UNMATCHED:
        await session.break_at(layer=layer, position=subject.max_model_len - 1)


async def _decode_rate(session: AsyncSession, prompt: TokenIds, tokens: int) -> float:
    """Tokens per second after the first event, which has the prompt's computation in front of it."""
    seen, seconds, watch = 0, 0.0, None
    async with session.stream(**greedy(prompt, tokens)) as stream:
        async for event in stream:
            if watch is not None:
                seconds += watch.lap()
                seen += len(event.token_ids)
            watch = watch or Stopwatch()
    if not seconds:
        raise Unmeasurable(f"all {tokens} tokens came at once: ask for more")
    return seen / seconds
