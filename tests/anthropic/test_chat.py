"""From the messages of a call to a chat as templates read it."""

from __future__ import annotations

from typing import Any

from app.anthropic.bodies import CountTokensBody
from app.anthropic.messages import Chat, chat_of


def chat(*messages: Any, system: Any = None) -> Chat:
    body = CountTokensBody.model_validate({"model": "tiny", "messages": list(messages), "system": system})
    return chat_of(body.system, body.messages)


def text(said: str) -> Any:
    return {"type": "text", "text": said}


def call(number: int) -> Any:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "now", "input": {"zone": "é"}}


def result(number: int, **fields: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", **fields}


def test_blocks_are_lines() -> None:
    assert chat({"role": "user", "content": [text("a"), text("b")]}, system=[text("c"), text("d")]) == [
        {"role": "system", "content": "c\nd"},
        {"role": "user", "content": "a\nb"},
    ]


def test_messages_of_one_role_in_a_row_are_one() -> None:
    said = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"), ("system", "f")]
    assert chat(*({"role": role, "content": content} for role, content in said)) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]


def test_calls_and_their_results_find_each_other() -> None:
    answers = [result(1, content="x"), result(2, content=[text("y"), text("z")], is_error=True), text("Well?")]
    found = chat(
        {"role": "assistant", "content": [text("See:"), call(1), call(2)]}, {"role": "user", "content": answers}
    )
    function = {"name": "now", "arguments": '{"zone": "é"}'}
    assert found == [
        {
            "role": "assistant",
            "content": "See:",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("1", "2")],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: y\nz", "tool_call_id": "2"},
        {"role": "user", "content": "Well?"},
    ]


def test_a_result_may_say_nothing() -> None:
    (answer,) = chat({"role": "user", "content": [result(1)]})
    assert answer == {"role": "tool", "content": "", "tool_call_id": "1"}
