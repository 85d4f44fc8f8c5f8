"""Turns that pause, that are steered, and what a pause costs their client.

A turn that pauses in every pass must say what it says without; a steered one says something else at some token.
"""

from collections import Counter
from collections.abc import Callable

from client import AsyncSession, DjinnError, Turn
from loadgen.experiments.whitebox.plan import Arm, Seen, Stage, Steered, Trial, Wait, Waited
from loadgen.load.prompts import TokenIds
from loadgen.load.stopwatch import Stopwatch
from loadgen.targets.subject import Subject, greedy


class Unmeasurable(DjinnError):
    """The server was faster than can be told."""


async def run_trials(stage: Stage, advance: Callable[[], None]) -> None:
    """Answer `plan.sequences` prompts for each layer, with pauses and without.

    Every trial has a prompt of its own, and its paused turn comes first: the whole prompt is then computed under
    breakpoints, and not taken from the prefix cache.
    """
    subject, plan, seen = stage.subject, stage.plan, stage.seen
    for index, layer in enumerate(stage.layers):
        for sequence in range(plan.sequences):
            prompt = stage.prompts[index * plan.sequences + sequence]
            turn, pauses = await _answer_with_pauses(subject, prompt, plan.tokens, layer, seen)
            plain = await _answer_without(subject, prompt, plan.tokens, seen)
            trial = Trial(layer, sequence, plain, turn.token_ids, pauses["prefill"], pauses["decode"])
            seen.trials.append(trial)
            advance()


async def _answer_with_pauses(
    subject: Subject, prompt: TokenIds, tokens: int, layer: int, seen: Seen
) -> tuple[Turn, Counter[str]]:
    """The turn, and how many passes of each kind paused."""
    pauses: Counter[str] = Counter()
    async with subject.session() as session:
        await session.break_at(layer=layer)
        turn = await session.generate(**greedy(prompt, tokens))
        while (checkpoint := turn.checkpoint) is not None:
            pauses[checkpoint.in_pass] += 1
            positions = checkpoint.end - checkpoint.first
            seen.waits.append(Wait(Waited.SAVED, positions, checkpoint.saved_ms / 1000))
            if checkpoint.in_pass == "prefill":
                await _read_and_write(session, seen)
            watch = Stopwatch()
            turn = await session.resume()
            if turn.checkpoint is not None:
                seen.waits.append(Wait(Waited.RESUME, positions, watch.lap()))
    return turn, pauses


async def _read_and_write(session: AsyncSession, seen: Seen) -> None:
    """Fetch what is there and put it back as it is: the answer must not notice."""
    checkpoint = await session.checkpoint()
    watch = Stopwatch()
    activation = await checkpoint.read()
    seen.waits.append(Wait(Waited.READ, len(activation), watch.lap()))
    await checkpoint.write(activation)
    seen.waits.append(Wait(Waited.WRITE, len(activation), watch.lap()))


async def _answer_without(subject: Subject, prompt: TokenIds, tokens: int, seen: Seen) -> TokenIds:
    async with subject.session() as session, session.stream(**greedy(prompt, tokens)) as stream:
        watch = None
        async for event in stream:
            if watch is not None and event.token_ids:
                seconds = watch.lap() / len(event.token_ids)
                seen.waits += len(event.token_ids) * [Wait(Waited.TOKEN, 1, seconds)]
            watch = watch or Stopwatch()
    return stream.turn.token_ids


async def run_steered(stage: Stage, advance: Callable[[], None]) -> None:
    """Answer the prompts of the first layer's trials once more for each layer, multiplied there by `plan.scale`."""
    subject, plan = stage.subject, stage.plan
    plain = [await subject.answer(prompt, plan.tokens) for prompt in stage.prompts[: plan.sequences]]
    for layer in stage.layers:
        for sequence, expected in enumerate(plain):
            async with subject.session() as session:
                await session.steer(layer=layer, scale=plan.scale)
                turn = await session.generate(**greedy(stage.prompts[sequence], plan.tokens))
            stage.seen.steered.append(Steered(layer, sequence, first_difference(expected, turn.token_ids)))
            advance()


def first_difference(expected: TokenIds, found: TokenIds) -> int | None:
    """Where the two part, None if they are the same."""
    if expected == found:
        return None
    same = (one == other for one, other in zip(expected, found, strict=False))
    return next((place for place, equal in enumerate(same) if not equal), min(len(expected), len(found)))


async def measure_rates(stage: Stage, advance: Callable[[], None]) -> None:
    """Decode with each `Arm` in turn, `plan.sequences` times, each time beginning with another one."""
    subject, plan, arms = stage.subject, stage.plan, tuple(Arm)
    for number in range(plan.sequences):
        first = number % len(arms)
        rates = {}
        for arm in (*arms[first:], *arms[:first]):
            async with subject.session() as session:
                await _arm(subject, session, arm, stage.middle_layer, plan.scale)
                rates[arm] = await _decode_rate(session, stage.prompts[0], plan.tokens)
        stage.seen.rates.append(rates)
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
