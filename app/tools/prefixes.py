"""Where a prompt ends what other chats begin with too. A model with recurrent layers keeps its state there: with KV
alone no other session can go on.

A mark goes into the chat, behind its instructions and tools and behind what the client has marked itself. The prompt is
rendered once more with the marks in it. They show the places, and are in no prompt.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import Any

from app.domain.errors import MalformedRequest
from app.text.tokenizer import Tokens
from app.tools.prompt import Message
from app.tools.support import ToolSupport

PREFIX_END = "END_OF_A_SHARED_PREFIX"
MOST_ENDS = 4
"""That a prompt may have; the first ones count."""


def mark_instructions(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """The chat with a mark behind the instructions that it begins with, and their tools: where its first other message
    has its text.
    """
    marked = [dict(message) for message in chat]
    for message in marked:
        if message["role"] not in ("system", "developer"):
            message["content"] = f"{PREFIX_END}{message.get('content') or ''}"
            break
    return marked


def prefix_ends(
    text: str, token_ids: Sequence[int], render_marked: Callable[[], str], tokens: Tokens, support: ToolSupport
) -> tuple[int, ...]:
    """How many of a prompt's tokens come before each mark; these numbers rise. `text` is the prompt's, `render_marked`
    gives that of the same chat with marks.

    None for a model without recurrent layers. None either if the template refuses the marked chat, or writes it in
    another way.
    """
    if not support.keeps_states:
        return ()
    try:
        parts = render_marked().split(PREFIX_END)
    except MalformedRequest:
        return ()
    places = [*accumulate(len(part.encode()) for part in parts[: min(MOST_ENDS, len(parts) - 1)])]
    if not places or "".join(parts) != text:
        return ()
    lengths = (len(tokens.token_bytes(token_id)) for token_id in token_ids)
    ends = [*takewhile(lambda end: end <= places[-1], accumulate(lengths))]
    return tuple(sorted({bisect_right(ends, place) for place in places}))
