"""From what a turn brings to the tokens that are appended to the session's history."""

from collections.abc import Sequence

from app.domain.errors import MalformedRequest
from app.text.token_lengths import TextLimit
from app.text.tokenizer import Tokens
from app.wire.base import check_token_ids
from app.wire.turns import GenerateBody

REPLY = "djinn-stands-for-a-reply"
EXCHANGE: list[dict[str, str]] = [{"role": "user", "content": "."}, {"role": "assistant", "content": REPLY}]
"""A conversation that ends as a session's history does: what a template writes behind `REPLY` is the same for both."""


def new_token_ids(
    body: GenerateBody, tokens: Tokens, history: Sequence[int], vocab_size: int, max_model_len: int
) -> list[int]:
    """The tokens of `body`'s input, as they follow `history`.

    A prompt is taken as it is; the special token that a tokenizer puts in front comes only where nothing stands
    before. Raises `FieldOutOfRange` for an id outside the vocabulary, `MalformedRequest` if the chat template rejects
    a message, `ContextTooLong` for a text that is certainly too long.
    """
    limit = TextLimit(body.input_field, max_model_len, len(history))
    if body.token_ids is not None:
        check_token_ids(body.token_ids, vocab_size, param="token_ids")
        return body.token_ids
    if body.prompt is not None:
        return tokens.encode(body.prompt, add_special_tokens=not history, limit=limit)
    messages = [message.model_dump() for message in body.messages or ()]
    if not history:
        return tokens.render_chat(messages, limit=limit)
    return following_token_ids(messages, tokens, history[-1], limit)


def following_token_ids(
    messages: list[dict[str, str]], tokens: Tokens, last_token_id: int, limit: TextLimit | None = None
) -> list[int]:
    """What a chat template writes between an assistant's reply and the next one, with `messages` in between.

    The history is taken to end with a reply of the assistant, which may be cut short or empty. Appending these tokens
    to it gives what rendering the whole conversation would give: the template closes the reply, writes the new messages
    and opens the next reply; a default system prompt is not written again. A reply that ended by itself has its end
    token in the history already, and everything up to that token is left out here.
    """
    closing = _after_reply(EXCHANGE, tokens, None, open_next=False)
    following = _after_reply(EXCHANGE + messages, tokens, limit, open_next=True)
    if last_token_id in tokens.eos_token_ids and last_token_id in closing and last_token_id in following:
        return following[following.index(last_token_id) + 1 :]
    return following


def _after_reply(
    messages: list[dict[str, str]], tokens: Tokens, limit: TextLimit | None, *, open_next: bool
) -> list[int]:
    """The tokens of everything behind `REPLY`, as they are when it stands before them.

    Raises `MalformedRequest` if the template rejects the messages or does not write `REPLY`.
    """
    text = tokens.chat_text(messages, add_generation_prompt=open_next)
    if REPLY not in text:
        raise MalformedRequest(
            "the model's chat template leaves out earlier replies, so these messages cannot follow the history",
            param="messages",
        )
    whole = tokens.encode(text, add_special_tokens=False, limit=limit)
    before = tokens.encode(text[: text.index(REPLY) + len(REPLY)], add_special_tokens=False)
    return whole[len(before) :]
