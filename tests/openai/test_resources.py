"""Each method that the SDKs of OpenAI and Anthropic have for what Djinn serves: all fields, strict types."""

import inspect
import json
from collections.abc import Callable, Iterator
from functools import cached_property, reduce
from typing import Any

import anthropic
import openai
import pytest

from tests.openai.conftest import MODEL
from tests.openai.responses.asking import GREEDY, LONG, LOOK_UP

COMPACT: Any = (
    {"model": MODEL, "input": "Hello", "instructions": "Be brief.", "image": {"context_compression": "auto"}}
    | {"prompt_cache_key": "key", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}, "service_tier": "auto"}
    | {"prompt_cache_retention": "in_memory"}
)
RESPONSE: Any = (
    COMPACT
    | {"max_output_tokens": 16, "background": False, "access_programs": {"cyber": "standard"}, "max_tool_calls": 0}
    | {"include": ["file_search_call.results"], "metadata": {"foo": "bar"}, "parallel_tool_calls": True, "store": True}
    | {"reasoning": {"effort": "none", "generate_summary": "auto", "context": "auto", "mode": "standard"}}
    | {"safety_identifier": "anybody", "user": "anybody"}
    | {"text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none", "truncation": "auto"}
    | {"background_options": {"continuation_id": "a"}, "context_management": [{"type": "compaction"}]}
    | {"moderation": {"model": "model", "policy": {"input": {"mode": "score"}, "output": {"mode": "score"}}}}
    | {"temperature": 1, "top_p": 1, "top_logprobs": 0, "tools": [{**LOOK_UP, "async": True, "defer_loading": True}]}
)
BACKGROUND: Any = {**RESPONSE, "background": True}
EPHEMERAL: Any = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
COUNTED: Any = (
    {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **EPHEMERAL}]}]}
    | {"system": [{"type": "text", "text": "Be brief.", **EPHEMERAL}], "speed": "standard", **EPHEMERAL}
    | {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": "low"}}
    | {"tools": [{"name": "look", "input_schema": {"type": "object"}, "eager_input_streaming": True}]}
    | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
)
MESSAGE: Any = (
    COUNTED
    | {"max_tokens": 8, "metadata": {"user_id": "anybody"}, "service_tier": "auto", "stop_sequences": ["string"]}
    | {"inference_geo": "us", "container": {"skills": [{"skill_id": "pdf", "type": "anthropic"}]}}
)
BETA: Any = {"mcp_servers": [{"name": "name", "type": "url", "url": "url"}], "thread": {"type": "create"}}
SIMPLE: Any = {name: MESSAGE[name] for name in ("model", "max_tokens", "messages")}
COUNT: Any = {
    name: RESPONSE[name] for name in ("model", "input", "instructions", "parallel_tool_calls", "reasoning")
} | {name: RESPONSE[name] for name in ("text", "tool_choice", "tools", "truncation")}
JSON_FORM: Any = {"text": {"format": {"type": "json_schema", "name": "summary", "schema": {"const": 1}}}}
ITEMS: Any = [{"type": "message", "role": "user", "content": "Hi"}]
PAGE: Any = {"limit": 1, "order": "asc"}


class Made:
    """What a test asks about, made when it does."""

    max_tokens = 2
    """Of the line of a batch."""

    def __init__(self, sdk: Any) -> None:
        self._sdk = sdk

    @cached_property
    def response(self) -> str:
        return str(self._sdk.responses.create(**GREEDY, input="Hi").id)

    @cached_property
    def conversation(self) -> str:
        return str(self._sdk.conversations.create(items=ITEMS, metadata={"foo": "bar"}).id)

    @cached_property
    def item(self) -> dict[str, str]:
        [item] = self._sdk.conversations.items.list(self.conversation, **PAGE, include=["file_search_call.results"])
        return {"item_id": item.id, "conversation_id": self.conversation}

    @cached_property
    def file(self) -> str:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": self.max_tokens, "ignore_eos": True}
        line = json.dumps({"custom_id": "0", "method": "POST", "url": "/v1/completions", "body": body}).encode()
        expires: Any = {"anchor": "created_at", "seconds": 3600}
        return str(self._sdk.files.create(file=line, purpose="batch", expires_after=expires).id)

    @cached_property
    def batch(self) -> str:
        asked: Any = {"input_file_id": self.file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self._sdk.batches.create(**asked, metadata={"foo": "bar"}).id)


def in_context(manager: Any) -> list[Any]:
    with manager as stream:
        return [*stream]


def cancel(sdk: Any) -> Any:
    with sdk.responses.create(**LONG, stream=True) as stream:
        return sdk.responses.cancel(next(iter(stream)).response.id)


def cancel_batch(sdk: Any, made: Made) -> Any:
    made.max_tokens = 900  # it must not be over before
    return sdk.batches.cancel(made.batch)


def compact(sdk: Any, response: str) -> Any:
    sdk._strict_response_validation = False  # its own type of a compaction has no messages of users
    return sdk.responses.compact(**COMPACT, previous_response_id=response, extra_body=JSON_FORM)


def connect(sdk: Any) -> Any:
    with sdk.responses.connect() as connection:
        connection.response.create(model=MODEL, input="Hi", max_output_tokens=2)
        return connection.recv()


Ask = Callable[[Any, Made], Any]
OPENAI: dict[str, Ask] = {
    "responses.create": lambda sdk, _: [
        sdk.responses.create(**RESPONSE),
        *sdk.responses.create(**RESPONSE, stream=True, stream_options={"include_obfuscation": True}),
        *sdk.responses.create(**BACKGROUND, stream=True),
        sdk.responses.retrieve(sdk.responses.create(**BACKGROUND).id),
    ],
    "responses.parse": lambda sdk, _: sdk.responses.parse(**GREEDY, input="Hi"),
    "responses.stream": lambda sdk, _: in_context(sdk.responses.stream(**GREEDY, input="Hi")),
    "responses.retrieve": lambda sdk, made: [
        sdk.responses.retrieve(made.response, include=["file_search_call.results"], include_obfuscation=True),
        *sdk.responses.retrieve(made.response, stream=True, starting_after=0),
    ],
    "responses.cancel": lambda sdk, _: cancel(sdk),
    "responses.compact": lambda sdk, made: compact(sdk, made.response),
    "responses.connect": lambda sdk, _: connect(sdk),
    "responses.delete": lambda sdk, made: sdk.responses.delete(made.response) is None,
    "responses.input_tokens.count": lambda sdk, _: sdk.responses.input_tokens.count(**COUNT, personality="friendly"),
    "responses.input_items.list": lambda sdk, made: (
        [*sdk.responses.input_items.list(made.response, **PAGE)]
        and not [*sdk.responses.input_items.list(made.response, limit=0)]
    ),
    "conversations.create": lambda sdk, made: made.conversation,
    "conversations.retrieve": lambda sdk, made: sdk.conversations.retrieve(made.conversation),
    "conversations.update": lambda sdk, made: sdk.conversations.update(made.conversation, metadata={"a": "b"}),
    "conversations.delete": lambda sdk, made: sdk.conversations.delete(made.conversation),
    "conversations.items.create": lambda sdk, made: sdk.conversations.items.create(made.conversation, items=ITEMS),
    "conversations.items.list": lambda sdk, made: made.item,
    "conversations.items.retrieve": lambda sdk, made: sdk.conversations.items.retrieve(**made.item),
    "conversations.items.delete": lambda sdk, made: sdk.conversations.items.delete(**made.item),
    "files.create": lambda sdk, _: sdk.files.create(file=b"Example data", purpose="assistants"),
    "files.list": lambda sdk, made: made.file and next(iter(sdk.files.list(**PAGE, purpose="batch"))),
    "files.retrieve": lambda sdk, made: sdk.files.retrieve(made.file),
    "files.content": lambda sdk, made: sdk.files.content(made.file).read(),
    "files.retrieve_content": lambda sdk, made: sdk.files.with_raw_response.content(made.file).text,  # deprecated
    "files.wait_for_processing": lambda sdk, made: sdk.files.wait_for_processing(made.file),
    "files.delete": lambda sdk, made: sdk.files.delete(made.file),
    "batches.create": lambda sdk, made: made.batch,
    "batches.list": lambda sdk, made: made.batch and next(iter(sdk.batches.list(limit=1))),
    "batches.retrieve": lambda sdk, made: sdk.batches.retrieve(made.batch),
    "batches.cancel": cancel_batch,
    # By itself the SDK asks for base64, which its types do not have.
    "embeddings.create": lambda sdk, _: sdk.embeddings.create(model=MODEL, input="Hi", encoding_format="float"),
}
ANTHROPIC: dict[str, Ask] = {
    "messages.create": lambda sdk, _: [sdk.messages.create(**MESSAGE), *sdk.messages.create(**MESSAGE, stream=True)],
    "messages.parse": lambda sdk, _: sdk.messages.parse(**SIMPLE),
    "messages.stream": lambda sdk, _: in_context(sdk.messages.stream(**MESSAGE)),
    "messages.count_tokens": lambda sdk, _: sdk.messages.count_tokens(**COUNTED),
    "beta.messages.create": lambda sdk, _: [*sdk.beta.messages.create(**MESSAGE, **BETA, stream=True)],
    "beta.messages.parse": lambda sdk, _: sdk.beta.messages.parse(**SIMPLE),
    "beta.messages.stream": lambda sdk, _: in_context(sdk.beta.messages.stream(**MESSAGE)),
    "beta.messages.count_tokens": lambda sdk, _: sdk.beta.messages.count_tokens(**COUNTED),
    "beta.messages.thread": lambda sdk, _: sdk.beta.messages.thread(**SIMPLE).send(),
    "beta.messages.tool_runner": lambda sdk, _: [*sdk.beta.messages.tool_runner(**SIMPLE, tools=MESSAGE["tools"])],
    "models.list": lambda sdk, _: [*sdk.models.list(limit=1)],
    "models.retrieve": lambda sdk, _: sdk.models.retrieve(MODEL),
}
NOT_SERVED: list[Callable[[Any], Any]] = [
    lambda sdk: sdk.messages.batches.list(),
    lambda sdk: sdk.files.list(),
    lambda sdk: sdk.files.upload(file=b"Example data"),
    lambda sdk: sdk.models.retrieve("nobody"),
]


@pytest.fixture
def sdks(openai_url: str) -> Iterator[Any]:
    strict: Any = {"api_key": "none", "max_retries": 0, "timeout": 30, "_strict_response_validation": True}
    with (
        openai.OpenAI(base_url=f"{openai_url}/v1", **strict) as ours,
        anthropic.Anthropic(base_url=openai_url, **strict) as theirs,
    ):
        yield ours, theirs


@pytest.mark.parametrize("name", [*OPENAI, *ANTHROPIC])
def test_an_sdk_has_an_answer_of_its_types_from_each_method(sdks: Any, name: str) -> None:
    sdk, asks = (sdks[0], OPENAI) if name in OPENAI else (sdks[1], ANTHROPIC)
    assert asks[name](sdk, Made(sdks[0]))
    resource = name.rpartition(".")[0]
    methods = inspect.getmembers(type(reduce(getattr, resource.split("."), sdk)), inspect.isfunction)
    asked = {each.rpartition(".")[2] for each in asks if each.rpartition(".")[0] == resource}
    assert asked == {each for each, _ in methods if not each.startswith("_")}, "the SDK has others"


@pytest.mark.parametrize("ask", NOT_SERVED)
def test_what_is_not_served_of_anthropics_api_is_404_in_its_form(sdks: Any, ask: Callable[[Any], Any]) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        ask(sdks[1])
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
