"""Log-probabilities in answers of Djinn's own API."""

import asyncio
import math

import orjson

from app.domain.values import TokenLogprobs
from app.routers.turns import SLICE, json_with_logprobs
from app.wire.turns import TokenEvent
from tests.others import turns_of_others

VIEW = TokenEvent(text="a", token_ids=[1])


def written(found: list[TokenLogprobs] | None) -> object:
    return orjson.loads(asyncio.run(json_with_logprobs(VIEW, found)))


def test_fields_are_those_of_the_schema() -> None:
    found = [TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.25))), TokenLogprobs(3, -math.inf)]
    top = [{"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -1.25}]
    scored = [{"token_id": 1, "logprob": -0.5, "top": top}, {"token_id": 3, "logprob": None, "top": []}]
    assert written(found) == {"text": "a", "token_ids": [1], "logprobs": scored}
    assert written([]) == {"text": "a", "token_ids": [1], "logprobs": []}
    assert written(None) == {"text": "a", "token_ids": [1]}, "who asks for none gets no field"


async def test_others_run_while_many_are_written() -> None:
    assert await turns_of_others(json_with_logprobs(VIEW, [TokenLogprobs(1, -0.5)] * (10 * SLICE))) >= 9
