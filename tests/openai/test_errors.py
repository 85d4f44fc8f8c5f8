"""What goes wrong comes back as the SDK's typed exceptions, and says which field and why."""

from typing import Any

import openai
import pytest

from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.serving import serve

CHAT: Any = [{"role": "user", "content": "Hello"}]
OBJECT: Any = {"type": "json_object"}
WRONG_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


def form(name: str, schema: dict[str, str]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def reply(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **fields}


def test_an_unknown_model_is_not_found(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="gpt-4o", messages=CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="gpt-4o", prompt="x")
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4o")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "max_tokens"), [(2000, None), (1, 5000), (2000, 0)])
def test_more_than_the_context_is_a_bad_request(sdk: Any, stream: bool, size: int, max_tokens: int | None) -> None:
    asked: Any = {"model": MODEL, "stream": stream, "max_tokens": max_tokens}
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        sdk.chat.completions.create(**asked, messages=[{"role": "user", "content": "x" * size}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if size > 1 else "max_tokens")
    with pytest.raises(openai.BadRequestError) as newer:
        sdk.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=5000)
    assert newer.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"moderation": {"model": "m", "policy": {"output": {"mode": "block"}}}}}, "moderation"),
        ({"response_format": form("a", {"type": "x"})}, "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": "a"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "min_tokens": 2}}, "min_tokens"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": OBJECT}, "response_format"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages.1.audio"),
        ({"messages": [reply(function_call={"name": "f", "arguments": "{}"})]}, "messages.0.function_call"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [reply(content=[{"type": "refusal"}])]}, "messages.0.content.0.refusal"),
        ({"messages": [reply(content=None)]}, "messages.0.content"),
        ({"messages": [reply(tool_calls=[WRONG_CALL])]}, "messages.0.tool_calls.0.function.arguments"),
    ],
)
def test_a_bad_chat_field_is_named(sdk: Any, wrong: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**{"model": MODEL, "messages": CHAT, **wrong})
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "field_out_of_range")
    assert str(caught.value.param).startswith(param)
    assert param.rsplit(".", 1)[-1] in caught.value.message


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt.1"),
        ({"prompt": [1, 512]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "n": 2}, "best_of"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"prompt": [[1], [512]]}, "prompt.1"),
    ],
)
def test_a_bad_completion_field_is_named(sdk: Any, wrong: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(**{"model": MODEL, "prompt": "x", **wrong})
    assert caught.value.param == param


def test_a_full_queue_is_a_rate_limit_and_the_sdk_tries_again(reference: Reference) -> None:
    with serve(model=str(reference.folder), api_keys=("one",), max_queue=1, max_running=1) as url:
        client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=CHAT)
        client = client.with_options(api_key="one")
        asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        running = client.completions.create(**asked, stream=True)
        next(iter(running))
        waiting = client.completions.create(**asked, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**asked)
        assert caught.value.response.headers["retry-after"] == "1"
        running.close()
        waiting.close()
        patient = client.with_options(max_retries=5)
        assert patient.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
        client.close()
