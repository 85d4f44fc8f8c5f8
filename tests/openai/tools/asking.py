"""Chats that offer two tools, and a check of the calls in their answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from openai.types.chat import ChatCompletionMessage

from app.model_store.byte_tokenizer import EOS_ID
from tests.openai.conftest import MODEL
from tests.tool_schemas import SCHEMAS

CHAT: Any = [{"role": "user", "content": "Which?"}]
NOW: Any = {"type": "function", "function": {"name": "now"}}


def tool(name: str, parameters: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "of use", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ENDS: Any = {str(EOS_ID): 50}
"""What makes the end as likely as any other token: the model never draws it by itself, and would call on and on."""
CALL: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "max_tokens": 400, "seed": 5, "logit_bias": ENDS}


def check_calls(message: ChatCompletionMessage) -> list[str]:
    """That every call is one that its tool takes; returns the tools."""
    names = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        names.append(call.function.name)
    assert len({call.id for call in message.tool_calls or ()}) == len(names)
    return names
