"""Whether a turn that pauses in every pass says what it says without, and what a pause costs its client."""

from collections import Counter
from collections.abc import Callable

from client import AsyncSession, Turn
from loadgen.experiments.whitebox.bench import Bench
from loadgen.experiments.whitebox.findings import Findings, RoundTrip, Saved, Trial, Waited
from loadgen.load.prompts import TokenIds
from loadgen.load.stopwatch import Stopwatch
from loadgen.targets.subject import Subject, greedy


async def run_trials(bench: Bench, advance: Callable[[], None]) -> None:
    """Answer `plan.sequences` prompts for each layer, with pauses and without.

    Every trial has a prompt of its own, and its paused turn comes first: the whole prompt is then computed under
    breakpoints, and not taken from the prefix cache.
    """
    subject, plan, findings = bench.subject, bench.plan, bench.findings
    for index, layer in enumerate(bench.layers):
        for sequence in range(plan.sequences):
            prompt = bench.prompts[index * plan.sequences + sequence]
            turn, pauses = await _answer_with_pauses(subject, prompt, plan.tokens, layer, findings)
            plain = await _answer_without(subject, prompt, plan.tokens, findings)
            trial = Trial(layer, sequence, plain, turn.token_ids, pauses["prefill"], pauses["decode"])
            findings.trials.append(trial)
            advance()


async def _answer_with_pauses(
    subject: Subject, prompt: TokenIds, tokens: int, layer: int, findings: Findings
) -> tuple[Turn, Counter[str]]:
    """The turn, and how many passes of each kind paused."""
    pauses: Counter[str] = Counter()
    async with subject.session() as session:
        await session.break_at(layer=layer)
        turn = await session.generate(**greedy(prompt, tokens))
        while (checkpoint := turn.checkpoint) is not None:
            pauses[checkpoint.in_pass] += 1
            positions = checkpoint.end - checkpoint.first
            findings.saved.append(Saved(positions, checkpoint.bytes, checkpoint.saved_ms / 1000))
            if checkpoint.in_pass == "prefill":
                await _read_and_write(session, findings)
            watch = Stopwatch()
            turn = await session.resume()
            if turn.checkpoint is not None:
                findings.round_trips.append(RoundTrip(Waited.RESUME, positions, watch.lap()))
    return turn, pauses


async def _read_and_write(session: AsyncSession, findings: Findings) -> None:
    """Fetch what is there and put it back as it is: the answer must not notice."""
    checkpoint = await session.checkpoint()
    watch = Stopwatch()
    activation = await checkpoint.read()
    findings.round_trips.append(RoundTrip(Waited.READ, len(activation), watch.lap()))
    await checkpoint.write(activation)
    findings.round_trips.append(RoundTrip(Waited.WRITE, len(activation), watch.lap()))


async def _answer_without(subject: Subject, prompt: TokenIds, tokens: int, findings: Findings) -> TokenIds:
    async with subject.session() as session, session.stream(**greedy(prompt, tokens)) as stream:
        watch = None
        async for event in stream:
            if watch is not None and event.token_ids:
                seconds = watch.lap() / len(event.token_ids)
                findings.round_trips += len(event.token_ids) * [RoundTrip(Waited.TOKEN, 1, seconds)]
            watch = watch or Stopwatch()
    return stream.turn.token_ids
