"""Calls with many prompts and long answers: others have turns of the event loop meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import orjson

from app.domain.values import SamplingParams, StopRule, Ticket, TokenLogprobs
from app.messages import PromptScored
from app.openai.answers import whole_json
from app.openai.choices import STARTED_AT_ONCE, Choices
from app.openai.completions.answer import CompletionChunkWriter, Echo, whole_choice
from app.openai.completions.logprobs import SLICE
from app.sessions.turns import TurnRequest
from app.text.generation import TextChunk
from app.text.turn_reader import TextRule
from tests.others import turns_of_others

TOKENS = 10 * SLICE
TOP = tuple((token_id, -1.5 - token_id) for token_id in range(20))


class Words:
    """A vocabulary of words."""

    special_ids: frozenset[int] = frozenset()
    drops_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"w%d " % token_id

    text_bytes = token_bytes


def scored(count: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(number % 10, -0.5, TOP) for number in range(count))


async def echo_entries() -> list[dict[str, Any]]:
    words: Any = Words()
    echoes = [Echo("w1 " * TOKENS, (1,) * TOKENS)]
    writer = CompletionChunkWriter(words, n=1, echoes=echoes, logprobs=True, token_ids=False)
    items = (PromptScored(Ticket(1), scored(TOKENS - 1)), TextChunk("w3 ", (3,), scored(1)))
    return [entry for item in items for entry in await writer.entries(0, item)]


async def test_others_run_while_an_echo_is_written() -> None:
    assert await turns_of_others(echo_entries()) >= TOKENS // SLICE - 1


async def test_a_whole_answer_has_each_list_in_one_piece() -> None:
    entries = await echo_entries()
    entries[-1]["finish_reason"] = "length"
    answer = orjson.loads(await whole_json({"id": "a"}, [whole_choice(0, entries, token_ids=False)], usage=None))
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(each) for each in logprobs.values()} == {TOKENS + 1}
    assert choice["text"] == "w1 " * TOKENS + "w3 "
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["top_logprobs"][-1] == {f"w{token_id} ": logprob for token_id, logprob in TOP}
    assert logprobs["text_offset"][-1] == 3 * TOKENS


async def test_many_choices_are_written_one_by_one() -> None:
    choices = [{"index": index} for index in range(8)]
    assert await turns_of_others(whole_json({}, choices)) >= 8


class Silent:
    """A turn without news."""

    async def __aiter__(self) -> AsyncIterator[object]:
        await asyncio.Event().wait()
        yield None


async def test_others_run_while_a_call_with_many_prompts_begins() -> None:
    begun: list[object] = []

    def start(*given: object) -> Silent:
        begun.append(given)
        return Silent()

    registry: Any = SimpleNamespace(turns=SimpleNamespace(start=start))
    session: Any = nullcontext()
    request = TurnRequest([1], SamplingParams(seed=1), StopRule(1), TextRule())
    count = 8 * STARTED_AT_ONCE
    charges: Any = [None] * count
    async with AsyncExitStack() as cleanup:
        choices = Choices(registry, [request] * count, 1, charges, lambda: session, cleanup)
        assert await turns_of_others(choices.start()) >= 7
    assert len(begun) == count
