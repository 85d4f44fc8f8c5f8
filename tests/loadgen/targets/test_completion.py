"""The events of a streamed completion, as OpenAI and vLLM write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from httpx_sse import ServerSentEvent

import client
from loadgen.targets.completion import CompletionDecoder

DONE = ServerSentEvent(data="[DONE]")
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def chunk(*choices: dict[str, Any], **fields: Any) -> ServerSentEvent:
    """A chunk with the fields around its choices that servers send and nobody needs here."""
    data = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices, **fields}
    return ServerSentEvent(data=json.dumps(data))


def test_text_and_usage() -> None:
    decoder = CompletionDecoder()
    assert decoder.feed(chunk({"index": 0, "text": "Hel", "finish_reason": None}, usage=None))
    assert decoder.feed(chunk({"index": 0, "text": "lo", "finish_reason": None}, usage=None))
    assert not decoder.feed(chunk({"index": 0, "text": "", "finish_reason": "length"}, usage=None))
    assert not decoder.feed(chunk(usage=USAGE | {"prompt_tokens_details": {"cached_tokens": 5}}))
    assert not decoder.feed(DONE)
    cost = decoder.cost()
    assert (decoder.text, decoder.token_ids) == ("Hello", ())
    assert (cost.prompt_tokens, cost.completion_tokens, cost.cached_tokens) == (7, 3, 5)


def test_token_ids_count_as_tokens_even_without_text() -> None:
    decoder = CompletionDecoder()
    assert decoder.feed(chunk({"index": 0, "text": "", "token_ids": [4]}))
    assert decoder.feed(chunk({"index": 0, "text": "é", "token_ids": [5, 6]}))
    decoder.feed(chunk(usage=USAGE | {"prompt_tokens_details": None}))
    decoder.feed(DONE)
    assert decoder.token_ids == (4, 5, 6)
    assert decoder.cost().cached_tokens is None


def test_a_stream_that_is_not_done_is_broken() -> None:
    decoder = CompletionDecoder()
    decoder.feed(chunk({"index": 0, "text": "Hel"}))
    with pytest.raises(client.StreamBroken):
        decoder.cost()


def test_a_completion_without_usage_cannot_be_counted() -> None:
    decoder = CompletionDecoder()
    decoder.feed(DONE)
    with pytest.raises(client.InvalidAnswer, match="usage"):
        decoder.cost()


def test_an_error_in_the_stream() -> None:
    """vLLM's `code` is a number."""
    error = {"error": {"message": "out of memory", "type": "InternalServerError", "param": None, "code": 500}}
    with pytest.raises(client.APIError, match="out of memory"):
        CompletionDecoder().feed(ServerSentEvent(data=json.dumps(error)))


@pytest.mark.parametrize("data", ["", "hello", "[]", '{"choices": 1}'])
def test_anything_else_is_not_a_completion(data: str) -> None:
    with pytest.raises(client.InvalidAnswer):
        CompletionDecoder().feed(ServerSentEvent(data=data))
