"""Log-probabilities in answers of Djinn's own API."""

from __future__ import annotations

import asyncio
import math

import orjson

from app.domain.values import TokenLogprobs
from app.wire.logprobs import SLICE, json_with_logprobs
from app.wire.turns import TokenEvent
from tests.others import turns_of_others

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


def test_what_was_written_is_not_written_again() -> None:
    written: list[bytes] = []
    found = [TokenLogprobs(number, -0.5) for number in range(2 * SLICE + 1)]
    first = asyncio.run(json_with_logprobs(VIEW, found, written))
    assert len(written) == 2
    assert first == asyncio.run(json_with_logprobs(VIEW, found))
    known = written[0]
    more = [*found, *found]
    again = asyncio.run(json_with_logprobs(VIEW, more, written))
    assert written[0] is known
    assert len(written) == 4
    assert again == asyncio.run(json_with_logprobs(VIEW, more))


def test_two_answers_at_once_write_each_slice_once() -> None:
    written: list[bytes] = []
    found = [TokenLogprobs(number, -0.5) for number in range(4 * SLICE)]

    async def both() -> list[bytes]:
        return await asyncio.gather(*[json_with_logprobs(VIEW, found, written) for _ in range(2)])

    one, other = asyncio.run(both())
    assert one == other
    assert len(written) == 4


async def test_others_run_while_many_are_written() -> None:
    assert await turns_of_others(json_with_logprobs(VIEW, [TokenLogprobs(1, -0.5)] * (10 * SLICE))) >= 9
