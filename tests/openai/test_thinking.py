"""A model that thinks, over each API, as the official SDKs read it. Agents that send back what it wrote.

Its weights are random, so a budget ends its thoughts and a grammar holds its answers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from tokenizers import AddedToken

from app.model_store.shapes import shape_config
from tests.hugging_face import byte_tokenizer
from tests.openai.conftest import MODEL
from tests.openai.reference import save_tiny_model
from tests.serving import own_server, serve
from tests.tool_schemas import ENDS, PLACE
from tests.tools.test_replay import TEMPLATE as AGENTS_TEMPLATE

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}"
)
SAY: Any = {"structured_outputs": {"choice": ["yes"]}, "logit_bias": {str(token): -100 for token in range(33)}}
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Sure?"}], "max_tokens": 100}
BUDGET = 6


def thinking_model(parent: Path, template: str, **fields: Any) -> Path:
    folder = parent / MODEL
    save_tiny_model(folder, **fields)
    tokenizer = byte_tokenizer(shape_config("tiny-llama").vocab_size - 2)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def openai_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(model=str(thinking_model(tmp_path_factory.mktemp("thinks"), TEMPLATE))) as url:
        yield url


@pytest.fixture
def messages(openai_url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=openai_url, api_key="none", max_retries=0, timeout=30) as client:
        yield client.messages


def prompt(http: httpx.Client, chat: Any, **fields: Any) -> str:
    """The text of a chat's prompt."""
    made = http.post("/tokenize", json={"messages": chat, "return_token_strs": True, **fields}).json()
    return "".join(made["token_strs"])


def test_a_chat_has_its_thoughts_beside_the_content(sdk: Any, http: httpx.Client) -> None:
    assert http.get(f"/v1/models/{MODEL}").json()["chat_format"] == "hermes+think"
    asked = {**ASK, "extra_body": {**SAY, "thinking_budget": BUDGET}, "seed": 1}
    answer = sdk.chat.completions.create(**asked)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")
    thought = choice.message.reasoning_content
    assert thought == choice.message.reasoning != ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == BUDGET + 1
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == BUDGET + 1
    said = [*ASK["messages"], {"role": "assistant", "content": "yes", "reasoning": "Hm."}]
    assert prompt(http, [*said, ASK["messages"][0]]).startswith("user:Sure?\nassistant:<think>Hm.</think>yes\n")


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"chat_template_kwargs": {"enable_thinking": False, "mode": 1}}, "chat_template_kwargs.mode"),
        ({"reasoning_effort": "none"}, None),
    ],
)
def test_thinking_is_turned_off_by_the_template(http: httpx.Client, fields: Any, ignored: str | None) -> None:
    told: Any = {"enable_thinking": False, "chat_template": TEMPLATE, "add_generation_prompt": True, "tokenize": False}
    expected = byte_tokenizer(300).apply_chat_template(ASK["messages"], **told)
    assert prompt(http, ASK["messages"], chat_template_kwargs={"enable_thinking": False}) == expected
    answer = http.post("/v1/chat/completions", json={**ASK, **SAY, **fields})
    body = answer.json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert answer.headers.get("X-Djinn-Ignored") == ignored


@pytest.mark.parametrize("summary", [None, "auto"])
def test_a_response_has_an_item_of_its_thoughts(sdk: Any, http: httpx.Client, summary: str | None) -> None:
    asked: Any = {
        "model": MODEL,
        "input": "Sure?",
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "reasoning": {"effort": "high", "summary": summary},
        "max_output_tokens": 100,
        "extra_body": {**SAY, "seed": 1, "thinking_budget": BUDGET},
    }
    whole = sdk.responses.create(**asked)
    thinking, message = whole.output
    assert (thinking.type, message.content[0].text) == ("reasoning", "yes")
    assert [bool(thinking.summary), bool(thinking.content)] == [summary is not None, summary is None]
    [part] = thinking.summary or thinking.content
    assert whole.usage.output_tokens_details.reasoning_tokens == BUDGET + 1
    assert len(message.content[0].logprobs) == len("yes")
    events = list(sdk.responses.create(**asked, stream=True))
    kind = "reasoning_summary_text" if summary else "reasoning_text"
    deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
    assert "".join(deltas) == part.text
    [done] = [event for event in events if event.type == f"response.{kind}.done"]
    assert (done.text, done.output_index) == (part.text, 0)
    assert events[-1].response.output[0].type == "reasoning"
    said = {"type": "message", "role": "assistant", "content": "yes"}
    sizes: list[int] = []
    for item in (thinking.model_dump(), {"type": "reasoning", "summary": [], "encrypted_content": "x"}):
        history: Any = ["Sure?", item, said, "Sure?"]
        history = [{"role": "user", "content": each} if isinstance(each, str) else each for each in history]
        asked = {"model": MODEL, "input": history, "max_output_tokens": 1}
        apart = {"X-Session-ID": f"{summary} {len(sizes)}"}  # else the second goes on from the tokens of the first
        again = http.post("/v1/responses", json=asked, headers=apart)
        assert "X-Djinn-Ignored" not in again.headers
        sizes.append(again.json()["usage"]["input_tokens"])
    assert sizes[0] - sizes[1] == len(part.text.encode()) + 2
    goes_on = sdk.responses.create(model=MODEL, input="Sure?", previous_response_id=whole.id, max_output_tokens=1)
    assert goes_on.usage.input_tokens == sizes[0]


def test_a_message_has_a_signed_block_of_its_thoughts(messages: Any, http: httpx.Client) -> None:
    asked = {**ASK, "thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": {**SAY, "seed": 1}}
    whole = messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    thinking, text = whole.content
    assert text.text == "yes"
    assert thinking.thinking
    assert thinking.signature
    assert whole.usage.output_tokens_details.thinking_tokens == BUDGET + 1
    with messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_message()
    assert {"thinking", "signature"} <= kinds
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (streamed.content[0].thinking, streamed.content[1].text) == (thinking.thinking, "yes")
    asked["thinking"]["display"] = "omitted"
    [hidden, _] = messages.create(**asked).content
    assert hidden.thinking == ""

    def counted(*blocks: Any) -> int:
        said = [*ASK["messages"], {"role": "assistant", "content": [*blocks, {"type": "text", "text": "yes"}]}]
        found: int = messages.count_tokens(model=MODEL, messages=[*said, *ASK["messages"]]).input_tokens
        return found

    shown = counted(thinking.model_dump())
    assert shown == counted(hidden.model_dump()) == counted({"type": "redacted_thinking", "data": thinking.signature})
    assert shown - counted() == len(thinking.thinking.encode()) + 2
    assert counted({"type": "redacted_thinking", "data": "AAAA"}) == counted()
    off = messages.create(**{**asked, "thinking": {"type": "disabled"}})
    assert [block.type for block in off.content] == ["text"]
    answer = http.post("/v1/messages", json={**ASK, "max_tokens": 0, "thinking": {"type": "adaptive"}})
    assert "X-Djinn-Ignored" not in answer.headers
    assert json.loads(answer.content)["content"] == []


LETTER: Any = {"type": "custom", "name": "note", "format": {"type": "grammar", "syntax": "regex", "definition": "x"}}
SPACE: Any = {"type": "namespace", "name": "space", "tools": [{"type": "function", "name": "f"}]}


@pytest.mark.parametrize(
    ("tool", "made"),
    [
        (LETTER, {"type": "custom_tool_call", "name": "note", "input": "x"}),
        (SPACE, {"type": "function_call", "name": "f", "namespace": "space", "arguments": "{}"}),
    ],
    ids=["custom", "namespace"],
)
def test_a_call_of_any_tool_follows_the_thoughts_of_a_response(sdk: Any, tool: Any, made: Any) -> None:
    extra = {"thinking_budget": BUDGET, "logit_bias": SAY["logit_bias"], "seed": 1}
    asked = {"model": MODEL, "input": "Sure?", "tools": [tool], "tool_choice": "required", "extra_body": extra}
    whole = sdk.responses.create(**asked, max_output_tokens=100)
    streamed = list(sdk.responses.create(**asked, max_output_tokens=100, stream=True))
    assert next(event.item.type for event in streamed if event.type == "response.output_item.done") == "reasoning"
    for thinking, call in (whole.output, streamed[-1].response.output):
        assert thinking.content[0].text == whole.output[0].content[0].text
        assert call.model_dump().items() >= made.items()
    output = {"type": f"{made['type']}_output", "call_id": whole.output[1].call_id, "output": "done"}
    sizes: list[int] = []
    for thinking in (whole.output[:1], []):
        history = [each.model_dump(exclude_none=True) for each in (*thinking, whole.output[1])]
        again = sdk.responses.create(model=MODEL, input=[*history, output], max_output_tokens=1)
        sizes.append(again.usage.input_tokens)
    assert sizes[0] - sizes[1] == len(whole.output[0].content[0].text.encode()) + 2


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
    template = AGENTS_TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    return thinking_model(tmp_path_factory.mktemp("replays"), template, max_model_len=4096)


@pytest.fixture(scope="module")
def agents(folder: Path) -> Iterator[httpx.Client]:
    with own_server(model=str(folder), max_model_len=4096, bind_by_prefix=True) as client:
        yield client


@pytest.mark.parametrize("name", ["agent", None])
@pytest.mark.parametrize("wire", PATHS)
def test_what_the_model_wrote_is_not_computed_again(agents: httpx.Client, wire: str, name: str | None) -> None:
    answers: list[Any] = []
    before: list[int] = []
    for _ in range(3):
        answer, history = say(agents, wire, answers, name and f"{name} of {wire}")
        assert "djinn" not in answer
        if answers:
            assert costs(answer)[0] >= costs(answers[-1])[1] - 1
            assert history[: len(before) - 1] == before[:-1], "all but the token that ended the turn"
        answers, before = [*answers, answer], history


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", ["chats", "messages", "responses"])
@pytest.mark.parametrize("is_named", [True, False])
def test_an_answer_tells_why_something_is_computed_again(
    agents: httpx.Client, wire: str, stream: bool, is_named: bool
) -> None:
    name = f"{stream} changes of {wire}" if is_named else None
    first, _ = say(agents, wire, [], name)
    days = 90 + 2 * list(PATHS).index(wire) + stream  # unlike any other test's: without a name, all histories count
    changed = {**body(wire, [first], days=days), "stream": stream}
    headers = {} if name is None else {"X-Session-ID": name}
    answer = agents.post(PATHS[wire], json=changed, headers=headers).raise_for_status()
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
