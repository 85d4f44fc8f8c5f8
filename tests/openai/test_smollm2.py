"""The real model through the SDK says what Transformers says, and its chat template is followed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "List three uses for a paper clip.",
    "A train leaves at 9:15 and arrives at 11:40. How long does the journey take?",
    "Write a Python function that reverses a string.",
    "Give me a recipe for pancakes with four ingredients. " * 12,
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


@pytest.mark.parametrize("questions", [QUESTIONS[:1], pytest.param(QUESTIONS, marks=pytest.mark.long)], ids=len)
def test_greedy_chats_at_once_and_again_are_what_transformers_generates(
    client: Any, real: Reference, questions: list[str]
) -> None:
    def ask(question: str) -> Any:
        messages = [{"role": "user", "content": question}]
        return client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=32)

    with ThreadPoolExecutor(len(questions)) as threads:
        said = [answer.choices[0].message.content for answer in threads.map(ask, questions)]
    prompts = [real.chat([{"role": "user", "content": question}]) for question in questions]
    assert said == [real.decode(real.greedy(prompt, 32)) for prompt in prompts]
    again = ask(questions[-1])
    assert again.choices[0].message.content == said[-1]
    assert again.usage.prompt_tokens_details.cached_tokens > len(prompts[-1]) - 2 * Settings().block_size


def test_a_reply_that_ends_by_itself_stops_and_shows_no_special_token(client: Any, real: Reference) -> None:
    messages: Any = [{"role": "user", "content": "Say only: yes"}]
    expected = real.greedy(real.chat(messages), 200)
    answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=200)
    assert expected[-1] == real.tokenizer.eos_token_id
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == real.decode(expected)
    assert answer.usage.completion_tokens == len(expected)


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
