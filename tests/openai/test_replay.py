"""Agents that send back what the model wrote, written anew: their sessions go on from the tokens that it wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from app.model_store.shapes import shape_config
from tests.hugging_face import byte_tokenizer
from tests.openai.conftest import MODEL
from tests.openai.reference import save_tiny_model
from tests.serving import serve
from tests.tool_schemas import ENDS, PLACE
from tests.tools.test_replay import TEMPLATE

BUDGET = 6
ASKED: Any = {"model": MODEL, "logit_bias": ENDS, "seed": 3, "parallel_tool_calls": False, "tool_choice": "required"}
USER: Any = {"role": "user", "content": "The weather?"}
FUNCTION: Any = {"name": "get_weather", "parameters": PLACE}
PATHS = {
    "chats": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "stored responses": "/v1/responses",
}


def body(wire: str, answers: list[Any], **other: int) -> Any:
    """The next call after the answers, whose calls come back in another order, with an argument that says nothing, or
    with `other` arguments; their thoughts do not.
    """

    def anew(arguments: dict[str, Any]) -> dict[str, Any]:
        return {**dict(reversed(arguments.items())), "note": None, **other}

    said: list[Any] = [USER]
    for answer in answers:
        if wire == "chats":
            [call] = answer["choices"][0]["message"]["tool_calls"]
            arguments = json.dumps(anew(json.loads(call["function"]["arguments"])), separators=(",", ":"))
            called = {**call, "function": {"name": "get_weather", "arguments": arguments}}
            said.append({"role": "assistant", "content": None, "tool_calls": [called]})
            said.append({"role": "tool", "tool_call_id": call["id"], "content": "42"})
        elif wire == "messages":
            call = answer["content"][-1]
            said.append({"role": "assistant", "content": [{**call, "input": anew(call["input"])}]})
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "42"}
            said.append({"role": "user", "content": [result]})
        else:
            call = answer["output"][-1]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
            again = {**call, "arguments": json.dumps(anew(json.loads(call["arguments"])), ensure_ascii=False)}
            said = [output] if wire == "stored responses" else [*said, again, output]
    if wire == "messages":
        asked = {name: ASKED[name] for name in ("model", "logit_bias", "seed")} | {"messages": said, "max_tokens": 300}
        asked["tools"] = [{"name": "get_weather", "input_schema": PLACE}]
        asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        return {**asked, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
    thinks = {**ASKED, "thinking_budget": BUDGET}
    if wire == "chats":
        return {**thinks, "messages": said, "max_tokens": 300, "tools": [{"type": "function", "function": FUNCTION}]}
    is_stored = wire == "stored responses"
    after = {"previous_response_id": answers[-1]["id"]} if is_stored and answers else {}
    tool = {"type": "function", **FUNCTION}
    return {**thinks, **after, "input": said, "max_output_tokens": 300, "tools": [tool], "store": is_stored}


def costs(answer: Any) -> tuple[int, int]:
    """Tokens of the prompt that had their KV, and of prompt and answer."""
    usage = answer["usage"]
    if "total_tokens" not in usage:
        cached = usage["cache_read_input_tokens"]
        return cached, usage["input_tokens"] + cached + usage["output_tokens"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return details["cached_tokens"], usage["total_tokens"]


def say(http: httpx.Client, wire: str, answers: list[Any], name: str | None) -> tuple[Any, list[int]]:
    """The next answer, and all tokens of its session."""
    headers = {} if name is None else {"X-Session-ID": name}
    answer = http.post(PATHS[wire], json=body(wire, answers), headers=headers).raise_for_status()
    history = http.get(f"/v1/sessions/{answer.headers['x-session-id']}/history").raise_for_status()
    return answer.json(), history.json()["token_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks, and whose template drops thoughts once the user speaks again."""
    folder: Path = tmp_path_factory.mktemp("replays") / MODEL
    save_tiny_model(folder, max_model_len=4096)
    tokenizer = byte_tokenizer(shape_config("tiny-llama").vocab_size - 2)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template = TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with (
        serve(model=str(folder), max_model_len=4096, bind_by_prefix=True) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize("name", ["agent", None])
@pytest.mark.parametrize("wire", PATHS)
def test_what_the_model_wrote_is_not_computed_again(http: httpx.Client, wire: str, name: str | None) -> None:
    answers: list[Any] = []
    before: list[int] = []
    for _ in range(3):
        answer, history = say(http, wire, answers, name and f"{name} of {wire}")
        assert "djinn" not in answer
        if answers:
            assert costs(answer)[0] >= costs(answers[-1])[1] - 1
            assert history[: len(before) - 1] == before[:-1], "all but the token that ended the turn"
        answers, before = [*answers, answer], history


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", ["chats", "messages", "responses"])
@pytest.mark.parametrize("is_named", [True, False])
def test_an_answer_tells_why_something_is_computed_again(
    http: httpx.Client, wire: str, stream: bool, is_named: bool
) -> None:
    name = f"{stream} changes of {wire}" if is_named else None
    first, _ = say(http, wire, [], name)
    days = 90 + 2 * list(PATHS).index(wire) + stream  # unlike any other test's: without a name, all histories count
    changed = {**body(wire, [first], days=days), "stream": stream}
    headers = {} if name is None else {"X-Session-ID": name}
    answer = http.post(PATHS[wire], json=changed, headers=headers).raise_for_status()
    assert '"djinn":{"recomputed_because":"answer 1: other arguments of get_weather"}' in answer.text


def test_sessions_from_before_a_restart_go_on_and_those_of_other_tenants_never(folder: Path, tmp_path: Path) -> None:
    settings: Any = {"model": str(folder), "max_model_len": 4096, "bind_by_prefix": True, "state_dir": tmp_path}
    names = dict(zip(PATHS, ("a", "b", None, None), strict=True))
    told: dict[str, Any] = {}
    for _ in range(2):
        with serve(**settings, api_keys=("one", "two")) as url:
            headers = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
            one, two = (httpx.Client(base_url=url, timeout=30, headers=each) for each in headers)
            with one, two:
                for wire, (answer, before) in told.items():
                    if wire != "stored responses":
                        _, theirs = say(two, wire, [answer], names[wire])
                        assert theirs[: len(before) - 1] != before[:-1]
                    _, history = say(one, wire, [answer], names[wire])
                    assert history[: len(before) - 1] == before[:-1]
                    assert len(one.get("/v1/sessions").json()["data"]) == len(told), "each call has found its session"
                if not told:
                    told = {wire: say(one, wire, [], name) for wire, name in names.items()}
