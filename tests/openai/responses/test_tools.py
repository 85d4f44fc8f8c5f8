"""Tools of agents on `/v1/responses`: each call as the client knows it, and again as the model wrote it."""

import json
import re
from typing import Any, cast

import httpx
import orjson
import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from app.domain.values import NEUTRAL, FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.openai.response import ResponseObject, to_chat
from app.openai.response_events import ResponseWriter
from app.openai.response_input import ResponseBody
from app.openai.response_tools import offered_tools
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.formats import HERMES, find_chat_format
from app.tools.lark import NotRegular, quoted_lark
from app.tools.reader import Answer, FamilyReader
from app.tools.thinking import Opening, Seal, ThoughtReader
from app.wire.calls import IMAGE_LEFT_OUT
from tests.openai.conftest import MODEL
from tests.openai.responses.asking import CALLING, GREEDY, LOOK_UP, folded
from tests.openai.responses.test_socket import ask
from tests.tools.calls import write

DEMO: Any = {"type": "namespace", "name": "mcp__demo", "description": "A demo.", "tools": [LOOK_UP]}
SEARCH: Any = {"type": "web_search"}
PATCH = """start: begin line+ "***"
begin: "*** Begin" LF
line: ("+" | "-") /(ab|[c"]){0,3}/ LF -> line  // as in Lark
%import common.LF
"""


def custom(name: str, syntax: str = "", definition: str = "") -> Any:
    form = {"type": "grammar", "syntax": syntax, "definition": definition} if syntax else {"type": "text"}
    return {"type": "custom", "name": name, "format": form}


TOOLS: Any = [
    *(DEMO, SEARCH, LOOK_UP, custom("note"), {"type": "shell"}, {"type": "local_shell"}, {"type": "apply_patch"}),
    {"type": "namespace", "name": "work", "tools": [custom("say")]},
]
CREATE: Any = {"type": "create_file", "path": "a", "diff": "+x"}


def told(
    name: str, arguments: str, *, cut: int = 0, thoughts: str | None = None
) -> tuple[list[Any], ResponseObject, ResponseBody]:
    """The events of an answer that calls this tool after `thoughts`, with some characters at its end cut, and the
    response.
    """
    body = ResponseBody.model_validate({"model": "m", "input": "x", "tools": TOOLS})
    tools = offered_tools(body.tools)
    text = write(HERMES, (name, arguments))
    text, reason = (text[:-cut], FinishReason.LENGTH) if cut else (text, FinishReason.STOP)
    reader: Any = FamilyReader(HERMES, [each.tool for each in tools])
    answer = Answer(reader)
    if thoughts is not None:
        text = f"{thoughts}</think>\n\n{text}"
        reader = ThoughtReader(cast("Any", find_chat_format("</think>")[1]), reader, Opening.OPEN)
        answer = Answer(reader)
    response = ResponseObject.begin(body, body.to_params(NEUTRAL), "resp_1", 1)
    writer = ResponseWriter(response, cast("Tokens", None), answer, {each.tool.name: each for each in tools})
    end = TurnFinished(Ticket(1), reason, TurnUsage(1, 0, 9, 0), 10)
    return [*writer.begin(), *writer.write(TextChunk(text)), *writer.finish(end), writer.last()], response, body


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("look_up", {"deep": True}, {"type": "function_call", "name": "look_up"}),
        ("mcp__demo__look_up", {"deep": True}, {"type": "function_call", "name": "look_up", "namespace": "mcp__demo"}),
        ("note", {"input": 'l1\n"é'}, {"type": "custom_tool_call", "name": "note", "input": 'l1\n"é'}),
        ("work__say", {"input": ""}, {"type": "custom_tool_call", "name": "say", "namespace": "work", "input": ""}),
        ("shell", {"commands": ["ls", "id"], "timeout_ms": 9}, {"type": "shell_call"}),
        ("local_shell", {"command": ["ls", "-l"], "working_directory": "/"}, {"type": "local_shell_call"}),
        ("apply_patch", CREATE, {"type": "apply_patch_call", "operation": CREATE}),
        ("apply_patch", {"type": "delete_file", "path": "a"}, {"type": "apply_patch_call"}),
        ("apply_patch", {"type": "update_file", "path": "a"}, {"type": "function_call", "name": "apply_patch"}),
        ("shell", {"commands": "ls"}, {"type": "function_call", "name": "shell"}),
    ],
)
@pytest.mark.parametrize("thoughts", [None, "Hm."])
def test_a_call_has_its_tools_form_and_goes_back_as_the_model_wrote_it(
    name: str, arguments: Any, item: Any, thoughts: str | None
) -> None:
    events, response, _ = told(name, json.dumps(arguments), thoughts=thoughts)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_json(orjson.dumps(event))
    *thinking, call = (each.model_dump() for each in response.output)
    TypeAdapter(list[ResponseOutputItem]).validate_python([*thinking, call])
    assert call.items() >= {**item, "status": "completed"}.items()
    kinds = ["reasoning"] * 2 * len(thinking) + [item["type"]] * 2
    assert [event["item"]["type"] for event in events if "item" in event] == kinds
    output = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "done", "status": "completed"}
    if call["type"] == "shell_call":
        output["output"] = [{"stdout": "done", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
    sent = ResponseBody.model_validate({"model": "m", "input": [*thinking, call, output]})
    assistant, tool = to_chat(None, sent.items(lambda item_id: pytest.fail(item_id), Seal()))
    assert assistant.get("reasoning_content") == thoughts
    (again,) = assistant["tool_calls"]
    assert (again["function"]["name"], json.loads(again["function"]["arguments"])) == (name, arguments)
    assert (again["id"], "done" in tool["content"]) == (tool["tool_call_id"], True)


@pytest.mark.parametrize("name", ["note", "shell"])
def test_a_call_that_is_cut_is_told_as_far_as_it_came(name: str) -> None:
    events, response, _ = told(name, '{"input": "one two"}', cut=len('wo"}}\n</tool_call>'))
    (call,) = (each.model_dump() for each in response.output)
    said = call["input"] if name == "note" else call["arguments"]
    assert (said[-5:], call["status"], response.status) == ("one t", "incomplete", "incomplete")
    assert events[-1]["type"] == "response.incomplete"


def test_a_patch_whose_call_is_cut_is_not_complete() -> None:
    events, response, _ = told("apply_patch", json.dumps(CREATE), cut=len("}\n</tool_call>"))
    (call,) = (each.model_dump() for each in response.output)
    assert (call["type"], call["status"], response.status) == ("apply_patch_call", "in_progress", "incomplete")
    TypeAdapter(ResponseStreamEvent).validate_json(orjson.dumps(events[-1]))


@pytest.mark.parametrize(
    ("tool", "choice", "expected", "form"),
    [
        (DEMO, {"name": "look_up"}, ("function_call", "look_up", "mcp__demo"), r'\{"deep": (true|false)\}'),
        (custom("t", "regex", r'a/"\n?b{1,3}'), {}, ("custom_tool_call", "t", None), r'a/"\n?b{1,3}'),
        (
            custom("t", "lark", PATCH),
            {},
            ("custom_tool_call", "t", None),
            r'\*\*\* Begin\n([+-](ab|[c"]){0,3}\n)+\*\*\*',
        ),
    ],
    ids=["namespace", "regex", "lark"],
)
def test_a_demanded_call_is_held_to_its_form(sdk: Any, tool: Any, choice: Any, expected: Any, form: str) -> None:
    kind = {"type": "custom" if tool is not DEMO else "function", "name": tool["name"], **choice}
    asked = {**CALLING, "tools": [SEARCH, tool], "tool_choice": kind, "input": "x", "stream": True}
    events = list(sdk.responses.create(**asked, extra_body={"logit_bias": {"256": 5}}))
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.namespace) == expected
    said = call.arguments if call.type == "function_call" else call.input
    if events[-1].type == "response.completed":
        assert re.fullmatch(form, said), said
    field = "function_call_arguments" if call.type == "function_call" else "custom_tool_call_input"
    assert folded(events)[3:5] == [f"response.{field}.delta", f"response.{field}.done"]
    assert "".join(event.delta for event in events if event.type == f"response.{field}.delta") == said


def test_what_only_other_servers_run_is_left_out_and_named(http: httpx.Client) -> None:
    history = [{"type": "compaction", "encrypted_content": "x"}, {"role": "user", "content": "x"}]
    body = {"model": MODEL, "input": history, "max_output_tokens": 1, "temperature": 0}
    recursive = custom("t", "lark", 'start: "(" start ")" | "a"')
    agent = {"tools": [SEARCH, {"type": "mcp"}, recursive], "tool_choice": "auto", "truncation": "auto"}
    both = [http.post("/v1/responses", json={**body, **each}) for each in ({"tools": [recursive]}, agent)]
    assert len({each.json()["usage"]["input_tokens"] for each in both}) == 1  # the prompt has none of them
    named = both[1].headers["x-djinn-ignored"].split(", ")
    assert sorted(named) == ["input.0", "tools.0", "tools.1", "tools.2.format", "truncation"]
    for rule in ("%ignore / /\nstart: /a/", "start: <|x|>", "start: %json {}"):
        with pytest.raises(NotRegular):
            quoted_lark(rule)


def test_unknown_fields_of_items_are_forgotten_and_halves_of_characters_replaced(http: httpx.Client) -> None:
    action = {"commands": ["ls"], "new": 2**70}
    call = {"type": "shell_call", "id": "sh_1", "call_id": "c", "action": action, "other": "\ud800"}
    thought = {"type": "reasoning", "id": "\ud800", "summary": [{"type": "summary_text", "text": "\ud800"}]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "t", "new": 2**70}]}
    tools = {"tools": [{"type": "custom", "name": "t"}], "tool_choice": choice}
    body = {"model": MODEL, "max_output_tokens": 1, "input": [call, thought, {"role": "user", "content": "x"}], **tools}
    made = http.post("/v1/responses", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert made.status_code == 200
    kept = http.get(f"/v1/responses/{made.json()['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert kept[0]["action"]["commands"] == ["ls"]
    assert "other" not in kept[0]
    assert "new" not in kept[0]["action"]
    assert kept[1]["content"][0]["text"] == "?"


def test_an_image_is_left_out_by_a_text_and_named(http: httpx.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:,x"}
    output = {"type": "function_call_output", "call_id": "c"}
    bodies: Any = [
        {"input": [call, {**output, "output": shown}], "model": MODEL, "max_output_tokens": 1}
        for shown in ([image], [{"type": "input_text", "text": IMAGE_LEFT_OUT}])
    ]
    answers = [http.post("/v1/responses", json=body) for body in bodies]
    assert answers[0].json()["usage"]["input_tokens"] == answers[1].json()["usage"]["input_tokens"]
    assert answers[0].headers["x-djinn-ignored"] == "input.1.output.0"
    chat = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}
    for path, field in (("/v1/chat/completions", "messages.0.content.0"), ("/tokenize", "")):
        answer = http.post(path, json={"model": MODEL, **chat, **({"max_tokens": 1} if field else {})})
        assert (answer.status_code, answer.headers.get("x-djinn-ignored", "")) == (200, field or "messages.0.content.0")


FLAT: Any = {"type": "function", "name": "mcp__demo__look_up"}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tools": [DEMO, FLAT]}, "tools: 'mcp__demo__look_up' is there twice"),
        ({"tools": [{**DEMO, "tools": [DEMO]}]}, "tools.0.tools.0: a tool of type function or custom"),
        ({"tools": [{**DEMO, "name": ""}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": f"f{index}"} for index in range(1100)]}, "tools: .*1024"),
        ({"tools": [{**DEMO, "name": f"n{index}", "tools": [LOOK_UP] * 2} for index in range(600)]}, "tools: .*1024"),
        ({"tools": [custom("t", "lark", "start: (")], "tool_choice": "required"}, "tools: the parameters of 't': "),
        ({"tools": [custom("t", "regex", "[b-a]"), DEMO]}, "tools: the parameters of 't': .*regex"),
        ({"tools": [custom(name, "regex", "a" * 40_000) for name in "tu"]}, "tools: .* 65536 characters .* 80000"),
        ({"tools": [custom("t", "bnf", "a")]}, "tools.0.format.*'lark' or 'regex'"),
        ({"tools": [{**custom("t"), "format": {"type": "bnf"}}]}, "tools.0.format: .* of type text or grammar"),
        ({"tools": [SEARCH], "tool_choice": SEARCH}, "tool_choice: .*web_search"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice: .*web_search"),
        ({"tools": [DEMO], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice: .*mcp"),
        ({"tools": [DEMO, LOOK_UP], "tool_choice": {"type": "custom", "name": "look_up"}}, "tool_choice: .*'look_up'"),
        ({"tools": [LOOK_UP], "tool_choice": 5}, "tool_choice"),
        ({"input": [{"type": "shell_call", "call_id": "c", "action": {"commands": "ls"}}]}, "input.0.action.commands"),
        ({"input": [{"type": "shell_call_output", "call_id": "c", "output": []}]}, "no shell_call with call_id 'c'"),
        ({"input": [{"type": "custom_tool_call", "name": "t", "input": ""}]}, "input.0.call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x" * 2**20}]},
            "input is too long",
        ),
    ],
)
def test_bad_tools_and_items_are_400_and_named(http: httpx.Client, wrong: Any, named: str) -> None:
    response = http.post("/v1/responses", json={"model": MODEL, "input": "x", **wrong})
    assert response.status_code == 400, response.text
    assert re.search(named, response.json()["error"]["message"]), response.text


def test_a_prompt_is_computed_without_output(sdk: Any) -> None:
    asked = {**GREEDY, "store": False}
    with sdk.responses.connect() as connection:
        events = ask(connection, **asked, generate=False, input="What is it? " * 20)
        first = events[-1].response
        second = ask(connection, **asked, previous_response_id=first.id, input="Say it")[-1].response
    assert [event.type.partition(".")[2] for event in events] == ["created", "in_progress", "completed"]
    assert (first.status, first.output, first.usage.output_tokens) == ("completed", [], 0)
    assert second.usage.input_tokens_details.cached_tokens == first.usage.input_tokens
    assert second.usage.output_tokens == 8


def test_text_that_is_held_back_keeps_its_log_probabilities(sdk: Any) -> None:
    asked = {"model": MODEL, "input": "x", "tools": [LOOK_UP], "tool_choice": "auto", "top_logprobs": 0}
    unheld = {**asked, "tools": [{**LOOK_UP, "strict": False}], "max_output_tokens": 3}
    events = list(sdk.responses.create(**unheld, stream=True, extra_body={"logit_bias": {str(ord("<")): 100}}))
    (message,) = events[-1].response.output
    (part,) = message.content
    assert (part.text, len(part.logprobs)) == ("<<<"[: len(part.text)], 3)
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert len(streamed) == 3
