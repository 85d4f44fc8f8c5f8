"""What the tests of `/v1/responses` ask for."""

from typing import Any

from tests.openai.conftest import MODEL

GREEDY: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
LETTERS: Any = {**GREEDY, "extra_body": {"structured_outputs": {"regex": "[a-z]{8}"}}}
"""Asks for text that becomes the same tokens again when a client sends it back."""
LONG: Any = {"model": MODEL, "input": "x", "extra_body": {"ignore_eos": True}}
DEPTH: Any = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
DEPTH["additionalProperties"] = False
LOOK_UP: Any = {"type": "function", "name": "look_up", "parameters": DEPTH, "strict": True}
CALLING: Any = {"model": MODEL, "tools": [LOOK_UP], "tool_choice": "required", "max_output_tokens": 200}
CALLING["parallel_tool_calls"] = False


def output_of(call_id: str) -> Any:
    """The item with a function's result."""
    return {"type": "function_call_output", "call_id": call_id, "output": "42"}


def folded(events: list[Any]) -> list[str]:
    """The types of the events, deltas in a row as one."""
    kinds = [event.type for event in events]
    return [kind for index, kind in enumerate(kinds) if not kind.endswith("delta") or kinds[index - 1] != kind]
