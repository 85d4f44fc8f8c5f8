"""Long answers, many prompts and many log-probabilities: others have turns meanwhile, and memory is not wasted."""

import time
import tracemalloc
from typing import Any

import httpx
import orjson

from app.domain.values import NEUTRAL, FinishReason, Ticket, TokenLogprobs, TurnUsage
from app.messages import PromptScored, TurnFinished
from app.openai.completions import CompletionChunkWriter, Echo
from app.openai.logprobs import SLICE
from app.openai.response import ResponseObject
from app.openai.response_events import ResponseWriter
from app.openai.response_input import ResponseBody
from app.openai.response_items import to_json
from app.text.generation import TextChunk
from app.tools.reader import Answer
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import GREEDY, LOOK_UP
from tests.others import turns_of_others

TOKENS = 2000
TOP = tuple((token_id, -1.5 - token_id) for token_id in range(20))


class Words:
    """A vocabulary of words."""

    special_ids: frozenset[int] = frozenset()
    drops_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"w%d " % token_id

    text_bytes = token_bytes

    def token_text(self, token_id: int) -> str:
        return f"w{token_id} "


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


SCORED: Any = {**GREEDY, "input": "Hello", "top_logprobs": 2}


def writer() -> ResponseWriter:
    body = ResponseBody.model_validate({"model": "m", "input": "x", "top_logprobs": 20})
    words: Any = Words()
    return ResponseWriter(ResponseObject.begin(body, body.to_params(NEUTRAL), "resp_1", 1), words, Answer())


def write(made: ResponseWriter) -> None:
    for number in range(TOKENS):
        chunk = TextChunk(" word", (number,), (TokenLogprobs(number, -0.5, TOP),))
        for event in made.write(chunk):
            orjson.dumps(event)


def end() -> TurnFinished:
    usage = TurnUsage(prompt_tokens=1, cached_tokens=0, completion_tokens=TOKENS, tokens_recomputed=0)
    ticket: Any = 1
    return TurnFinished(ticket, FinishReason.STOP, usage, TOKENS + 1)


def test_the_end_of_a_long_response_is_written_at_once() -> None:
    made = writer()
    write(made)
    began = time.process_time()
    for event in made.finish(end()):
        orjson.dumps(event)
    orjson.dumps(made.last())
    to_json(made.response)
    assert time.process_time() - began < 0.1  # as objects, it takes half a second


def test_a_kept_response_takes_as_much_memory_as_its_json() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = writer()
        write(made)
        for _ in made.finish(end()):
            pass
        response = made.response
        del made
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1.2 * len(to_json(response))


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
