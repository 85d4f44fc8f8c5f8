"""From the messages of a chat to its tokens, without losing what a client says in them."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.openai.messages import Message
from app.text.tokenizer import Tokens

MAY_BE_LEFT_OUT = (("system", "name"), ("user", "name"), ("assistant", "name"), ("assistant", "tool_calls"))
"""Fields of messages that not every chat template writes."""


def chat_prompt(
    messages: Sequence[Message],
    tokens: Tokens,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[int]:
    """Token ids of the chat in the model's own template; the arguments and errors of `Tokens.chat_text`.

    Raises `FieldOutOfRange` for a field that makes no difference to the text.
    """
    render = partial(
        tokens.chat_text,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    chat = [message.for_template() for message in messages]
    text = render(chat)
    for role, field in MAY_BE_LEFT_OUT:
        having = [index for index, message in enumerate(chat) if message["role"] == role and field in message]
        with suppress(MalformedRequest):  # a template that must have the field does not leave it out
            if having and render(_without(chat, role, field)) == text:
                name = f"messages.{having[0]}.{field}"
                raise FieldOutOfRange(f"{name}: this model's chat template leaves it out", param=name)
    return tokens.encode(text, add_special_tokens=False)


def _without(chat: list[dict[str, Any]], role: str, field: str) -> list[dict[str, Any]]:
    """The chat, the messages of `role` without `field`."""
    return [
        {key: value for key, value in message.items() if key != field} if message["role"] == role else message
        for message in chat
    ]
