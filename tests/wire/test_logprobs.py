"""Log-probabilities in answers of Djinn's own API."""

from __future__ import annotations

import asyncio
import math

import orjson

from app.domain.values import TokenLogprobs
from app.wire.logprobs import SLICE, json_with_logprobs
from app.wire.turns import TokenEvent

VIEW = TokenEvent(text="a", token_ids=[1])


def written(found: list[TokenLogprobs] | None) -> object:
    return orjson.loads(asyncio.run(json_with_logprobs(VIEW, found)))


def test_fields_are_those_of_the_schema() -> None:
    found = [TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.25))), TokenLogprobs(3, -math.inf)]
    answer = written(found)
    assert answer == {
        "text": "a",
        "token_ids": [1],
        "logprobs": [
            {
                "token_id": 1,
                "logprob": -0.5,
                "top": [{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -1.25}],
            },
            {"token_id": 3, "logprob": None, "top": []},
        ],
    }


def test_who_asks_for_none_gets_no_field() -> None:
    assert written(None) == {"text": "a", "token_ids": [1]}
    assert written([]) == {"text": "a", "token_ids": [1], "logprobs": []}


def test_others_run_while_many_are_written() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def write() -> None:
        running = asyncio.create_task(others())
        await json_with_logprobs(VIEW, [TokenLogprobs(1, -0.5)] * (10 * SLICE))
        running.cancel()

    asyncio.run(write())
    assert turns >= 9
