"""The messages of a call, and the same as chat templates read them."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag
from typing_extensions import TypeAliasType

from app.anthropic.content import (
    AssistantContent,
    TextBlock,
    TextContent,
    ToolUseBlock,
    UserContent,
    text_of,
)
from app.wire.extras.body import OpenBody

ID_PREFIX = "toolu_"
"""Begins the ids of calls. Chat templates read the rest, whose length some of them check."""

Chat = list[dict[str, Any]]


class SystemInput(OpenBody):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: TextContent

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it."""
        yield {"role": "system", "content": text_of(self.content)}


class UserInput(OpenBody):
    """What the user says, and what tools answered."""

    role: Literal["user"]
    content: UserContent

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it: each answer of a tool is a message of its own."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        for block in self.content:
            if isinstance(block, TextBlock):
                yield {"role": "user", "content": block.text}
            else:
                call_id = block.tool_use_id.removeprefix(ID_PREFIX)
                yield {"role": "tool", "content": block.text, "tool_call_id": call_id}


class AssistantInput(OpenBody):
    """What the model said earlier, and its calls. The last message may be the beginning of the answer."""

    role: Literal["assistant"]
    content: AssistantContent

    def for_template(self) -> Iterator[dict[str, Any]]:
        """The message as chat templates read it, but that the arguments of its calls are still text."""
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        calls = [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]
        yield {"role": "assistant", "content": text_of(texts)} | ({"tool_calls": calls} if calls else {})


def _role_of(message: object) -> str | None:
    found = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return found if found in ("system", "user", "assistant") else None


MessageInput = TypeAliasType(
    "MessageInput",
    Annotated[
        Annotated[SystemInput, Tag("system")]
        | Annotated[UserInput, Tag("user")]
        | Annotated[AssistantInput, Tag("assistant")],
        Discriminator(
            _role_of, custom_error_type="role", custom_error_message="a message of the role user, assistant or system"
        ),
    ],
)


def chat_of(system: str | Sequence[TextBlock] | None, messages: Sequence[MessageInput]) -> Chat:
    """The conversation as chat templates read it. Messages of one role that follow each other are one."""
    chat: Chat = [] if system is None else [{"role": "system", "content": text_of(system)}]
    for message in messages:
        for each in message.for_template():
            if chat and _is_continued(chat[-1], each):
                chat[-1]["content"] += f"\n{each.pop('content')}"
                chat[-1] |= each
            else:
                chat.append(each)
    return chat


def _is_continued(last: dict[str, Any], new: dict[str, Any]) -> bool:
    return last["role"] == new["role"] != "tool" and "tool_calls" not in last


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    call_id = block.id.removeprefix(ID_PREFIX)
    return {"id": call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
