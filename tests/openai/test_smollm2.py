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


EDIT: Any = {"name": "edit", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


def call_of(text: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'edit', 'arguments': {'text': text}})}\n</tool_call>"


def say(client: Any, text: str, **fields: Any) -> Any:
    """The whole choice of an answer that says `text`, which is streamed alike."""
    chat: Any = []
    for said in ("A1", text):
        chat += [{"role": "user", "content": f"Repeat exactly: {said}"}, {"role": "assistant", "content": said}]
    asked = {"model": NAME, "messages": [*chat, chat[-2]], "temperature": 0, "max_tokens": 100, **fields}
    asked["tools"] = [{"type": "function", "function": EDIT}]
    [choice] = client.chat.completions.create(**asked).choices
    content, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        content += chunk.choices[0].delta.content or ""
        arguments += "".join(call.function.arguments or "" for call in chunk.choices[0].delta.tool_calls or ())
    assert chunk.choices[0].finish_reason == choice.finish_reason
    assert content == (choice.message.content or "")
    assert arguments == "".join(call.function.arguments for call in choice.message.tool_calls or ())
    return choice


LINES = call_of("l1\nl2").replace("\\n", "\n")
AS_TEXT = call_of("x").replace('{"text": "x"}', r'"{\"text\": \"x\"}"')


@pytest.mark.parametrize(("call", "text"), [(LINES, "l1\nl2"), (AS_TEXT, "x")], ids=["line break", "text"])
def test_a_call_of_a_small_model_is_read(client: Any, call: str, text: str) -> None:
    choice = say(client, call)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"text": text}


def test_a_call_of_no_tool_stays_in_the_content_and_a_cut_one_does_not(client: Any) -> None:
    foreign = call_of("x").replace("edit", "nope")
    choice = say(client, foreign)
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", foreign, None)
    for max_tokens in (1, 4, 12, 15):
        choice = say(client, call_of("x"), max_tokens=max_tokens)
        assert (choice.finish_reason, choice.message.content) == ("length", ""), max_tokens
