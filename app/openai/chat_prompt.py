"""From the messages of a chat to its tokens, and which of their fields the chat template leaves out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.openai.chat import ROLE_TAGS
from app.text.tokenizer import CharacterLimit, TextLimit, Tokens
from app.tools.definitions import Tool
from app.tools.prefixes import mark_instructions, prefix_ends
from app.tools.replay import Chat, ChatPrompt
from app.tools.support import ToolSupport

MAX_CHECKED = 8
"""Roles, and fields, of a chat that are tried one by one: each costs a rendering of the chat."""
ALWAYS_TAKEN = {
    "assistant": frozenset({"role", "content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
STAND_INS = ("user", "assistant", "system")

Render = Callable[[Chat], str]


def chat_prompt(
    messages: Iterable[dict[str, Any]],
    tokens: Tokens,
    support: ToolSupport,
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    limit: TextLimit | CharacterLimit | None = None,
) -> ChatPrompt:
    """The `messages`, as chat templates read them, in the model's own template with its `tools`; the other arguments
    and errors of `Tokens.chat_text` and `Tokens.encode`.

    Raises `FieldOutOfRange` for messages of a role that make no difference to the text.
    """
    render = partial(
        support.chat_text,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    chat = list(messages)
    try:
        text = render(chat)
    except MalformedRequest as error:
        raise _refusal(chat, render, error) from error
    _check_roles(chat, text, render)
    left_out = _left_out(chat, text, render)
    paths = (
        f"messages.{index}.{name}"
        for index, message in enumerate(chat)
        for name in message
        if (message["role"], name) in left_out
    )

    def encode(chat: Chat) -> list[int]:
        return tokens.encode(render(chat), add_special_tokens=False, limit=limit)

    token_ids = tokens.encode(text, add_special_tokens=False, limit=limit)
    ends = prefix_ends(text, token_ids, lambda: render(mark_instructions(chat)), tokens, support)
    return ChatPrompt(chat, tools, encode, token_ids, support.opening(text), paths, ends)


def _text(chat: Chat, render: Render) -> str | None:
    """The text of a changed chat; None: the template does not take it."""
    try:
        return render(chat)
    except MalformedRequest:
        return None


def _custom_roles(chat: Chat) -> dict[str, int]:
    """Roles beside OpenAI's, each with the index of its first message. Raises `FieldOutOfRange` for too many."""
    roles: dict[str, int] = {}
    for index, message in enumerate(chat):
        if message["role"] not in ROLE_TAGS:
            roles.setdefault(message["role"], index)
    if len(roles) > MAX_CHECKED:
        raise FieldOutOfRange(f"messages: at most {MAX_CHECKED} roles besides {', '.join(ROLE_TAGS)}", param="messages")
    return roles


def _refusal(chat: Chat, render: Render, error: MalformedRequest) -> MalformedRequest:
    """The template's refusal, which names a role if the chat would be taken with another role in its place."""
    roles = _custom_roles(chat)
    for refused in [{role} for role in roles] + [set(roles)] * (len(roles) > 1):
        for stand_in in STAND_INS:
            changed = [{**each, "role": stand_in} if each["role"] in refused else each for each in chat]
            if _text(changed, render) is not None:
                name = f"messages.{min(roles[role] for role in refused)}.role"
                return MalformedRequest(f"{name}: {error.message}", param=name)
    return error


def _check_roles(chat: Chat, text: str, render: Render) -> None:
    """Raise `FieldOutOfRange` for a role whose messages the template leaves out."""
    for role, first in _custom_roles(chat).items():
        changed = [
            {**each, "content": f"{each['content']}x"} if each["role"] == role and "content" in each else each
            for each in chat
        ]
        if "content" in chat[first] and _text(changed, render) == text:
            name = f"messages.{first}.role"
            raise FieldOutOfRange(f"{name}: this model's chat template leaves out messages of this role", param=name)


def _left_out(chat: Chat, text: str, render: Render) -> set[tuple[str, str]]:
    """The fields, each with the role of its messages, that the template leaves out.

    Raises `FieldOutOfRange` for too many of them if they are not all left out.
    """
    fields = {
        (each["role"], name)
        for each in chat
        for name in each.keys() - ALWAYS_TAKEN.get(each["role"], {"role", "content"})
    }
    if not fields or _text(_without(chat, fields), render) == text:
        return fields
    if len(fields) > MAX_CHECKED:
        raise FieldOutOfRange(f"messages: at most {MAX_CHECKED} fields besides role and content", param="messages")
    return {field for field in fields if _text(_without(chat, {field}), render) == text}


def _without(chat: Chat, fields: set[tuple[str, str]]) -> Chat:
    return [{name: value for name, value in each.items() if (each["role"], name) not in fields} for each in chat]
