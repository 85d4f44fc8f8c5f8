"""Tools that no chat may have, each refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.tools.asking import CALL, CHAT, TOOLS, tool


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, tool("a", {"type": "integer"})]}, "tools.2.function.parameters"),
        ({"tools": [tool("a", {"type": ["object", "null"]})]}, "tools.0.function.parameters"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(http: httpx.Client, changed: Any, param: str) -> None:
    response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "max_tokens": 2, **changed})
    assert_error(response, 400, "field_out_of_range", param=param)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
def test_a_refused_schema_is_named_by_its_tool_and_shows_no_other(http: httpx.Client, choice: Any) -> None:
    tools = [*TOOLS, tool("bad", {"not": {"type": "object"}})]
    response = http.post("/v1/chat/completions", json={**CALL, "tools": tools, "tool_choice": choice})
    message = assert_error(response, 400, "field_out_of_range", param="tools")
    assert message.startswith("tools: the parameters of 'bad': Unimplemented keys")
    assert "get_weather" not in message
