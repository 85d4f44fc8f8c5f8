"""Whether a session says among all others what it says by itself."""

from collections.abc import Callable

from loadgen.errors import NotAsMeant
from loadgen.experiments.oversubscribe.findings import Check, Findings
from loadgen.experiments.oversubscribe.growing import Histories
from loadgen.experiments.oversubscribe.plan import OversubscribePlan
from loadgen.load.prompts import TokenIds
from loadgen.results.failures import noting
from loadgen.targets.subject import Subject, greedy


async def check_sessions(
    subject: Subject, plan: OversubscribePlan, histories: Histories, findings: Findings, step: Callable[[], None]
) -> None:
    """Answer some of the sessions again, turn by turn and one at a time, as far as they came."""
    for number in plan.checked_sessions:
        turns = sorted((turn for turn in findings.turns if turn.session == number), key=lambda each: each.turn)
        with noting(f"session {number} once more", findings.failures):
            if turns:
                crowded = tuple(token for turn in turns for token in turn.token_ids)
                alone = await _answer_alone(subject, [histories[number][turn.turn] for turn in turns], plan.tokens)
                findings.checks.append(Check(number, crowded, alone))
        step()


async def _answer_alone(subject: Subject, texts: list[TokenIds], tokens: int) -> TokenIds:
    """What a fresh session says to the same texts. Raises `NotAsMeant`, `DjinnError`.

    It multiplies its residual stream by 1, which changes nothing, but keeps it apart from the prefix cache: KV that was
    computed with an edit is shared only with sessions that made the same. So all of its KV is computed from scratch.
    """
    answer: TokenIds = ()
    async with subject.session() as session:
        await session.steer(layer=0, scale=1.0)
        for place, text in enumerate(texts):
            turn = await session.generate(**greedy(text, tokens))
            if not place and turn.usage.cached_tokens:
                raise NotAsMeant(f"{turn.usage.cached_tokens} tokens of a fresh session came from the prefix cache")
            answer += turn.token_ids
    return answer
