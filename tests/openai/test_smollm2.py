"""The real model through the SDK says what Transformers says, and its chat template is followed."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from app.model_store.commands import export_model
from app.settings import Settings
from tests.openai.reference import Reference
from tests.serving import serve

NAME = "smollm2-135m-instruct"
pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

QUESTIONS = [
    "Schreib einen Satz über Züge. 😀",
    pytest.param("What is the capital of France?", marks=pytest.mark.long),
    pytest.param("Name three colours.", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def real() -> Reference:
    return Reference(export_model(NAME, Settings().cache_dir))


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        serve(model=NAME, kv_device=256 << 20) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_greedy_chat_is_what_transformers_generates(client: Any, real: Reference, question: str) -> None:
    messages: Any = [{"role": "user", "content": question}]
    asked: Any = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 32}
    expected = real.decode(real.greedy(real.chat(messages), 32))
    assert client.chat.completions.create(**asked).choices[0].message.content == expected
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected


def test_a_reply_that_ends_by_itself_stops_and_shows_no_special_token(client: Any, real: Reference) -> None:
    messages: Any = [{"role": "user", "content": "Say only: yes"}]
    expected = real.greedy(real.chat(messages), 200)
    answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=200)
    assert expected[-1] == real.tokenizer.eos_token_id
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == real.decode(expected)
    assert answer.usage.completion_tokens == len(expected)


def test_a_conversation_in_a_session_computes_only_what_is_new(client: Any) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a fact about cats."}]
    asked: Any = {"model": NAME, "temperature": 0, "max_tokens": 30, "extra_headers": {"X-Session-ID": "cats"}}
    first = client.chat.completions.create(**asked, messages=messages)
    messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "Another one, please."}]
    usage = client.chat.completions.create(**asked, messages=messages).usage
    # The last token that was generated has no KV yet, and what follows may change how the end is cut into tokens.
    assert first.usage.total_tokens - 2 <= usage.prompt_tokens_details.cached_tokens <= first.usage.total_tokens


CALL = '<tool_call>\n{"name": "edit", "arguments": {"text": "x"}}\n</tool_call>'
AS_TEXT = CALL.replace('{"text": "x"}', r'"{\"text\": \"x\"}"')
FOREIGN = CALL.replace("edit", "nope")


@pytest.mark.parametrize(
    ("said", "limit", "told"),
    [
        (CALL.replace('"x"', '"l1\nl2"'), 99, ("tool_calls", "", [{"text": "l1\nl2"}])),
        (AS_TEXT, 99, ("tool_calls", "", [{"text": "x"}])),
        (FOREIGN, 99, ("stop", FOREIGN, [])),
        *((CALL, limit, ("length", "", [])) for limit in (1, 4, 12, 15)),
    ],
)
def test_calls_of_a_small_model(client: Any, said: str, limit: int, told: tuple[str, str, list[Any]]) -> None:
    chat: Any = []
    for each in ("A1", said, said):
        chat += [{"role": "user", "content": f"Repeat exactly: {each}"}, {"role": "assistant", "content": each}]
    asked = {"model": NAME, "messages": chat[:-1], "temperature": 0, "max_tokens": limit}
    tools = [{"type": "function", "function": {"name": "edit"}}]
    [choice] = client.chat.completions.create(**asked, tools=tools).choices
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()]
    assert (choice.finish_reason, choice.message.content or "", arguments) == told
