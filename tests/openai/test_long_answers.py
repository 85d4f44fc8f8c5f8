"""Answers with log-probabilities: events and the whole say the same, and what follows does not keep them again."""

from typing import Any

import httpx

from tests.openai.conftest import MODEL
from tests.openai.responses.asking import GREEDY, LOOK_UP

SCORED: Any = {**GREEDY, "input": "Hello", "top_logprobs": 2}


def test_events_and_the_whole_say_the_same(sdk: Any, http: httpx.Client) -> None:
    events = list(sdk.responses.create(**SCORED, stream=True))
    part = events[-1].response.output[0].content[0]
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 8
    [done] = [event for event in events if event.type == "response.output_text.done"]
    told = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    whole = [(each.token, each.logprob) for each in part.logprobs]
    assert (
        [(each.token, each.logprob) for each in told] == [(each.token, each.logprob) for each in done.logprobs] == whole
    )
    assert all(bytes(each.bytes).decode(errors="replace") == each.token for each in part.logprobs)
    kept = http.get(f"/v1/responses/{events[-1].response.id}").json()
    assert kept["output"][0]["content"][0]["logprobs"] == [each.model_dump() for each in part.logprobs]


def test_who_goes_on_after_a_response_does_not_keep_them_again(sdk: Any) -> None:
    made = sdk.responses.create(**SCORED)
    reference: Any = [{"type": "item_reference", "id": made.output[0].id}, {"role": "user", "content": "More"}]
    after = sdk.responses.create(**{**GREEDY, "input": reference})
    [item, _] = sdk.responses.input_items.list(after.id, order="asc")
    assert (item.content[0].text, item.content[0].logprobs) == (made.output_text, [])


def test_a_schema_with_a_huge_integer_is_given_back(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**70}}}
    tool = {**LOOK_UP, "parameters": schema, "strict": False}
    body = {"model": MODEL, "input": "x", "max_output_tokens": 1, "tools": [tool], "stream": True}
    answer = http.post("/v1/responses", json=body)
    assert str(2**70) in answer.text.splitlines()[-2], answer.text
