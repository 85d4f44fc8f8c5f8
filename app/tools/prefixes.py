"""Where the prefixes of a prompt end that other chats may share. For a model with recurrent layers Djinn keeps a state
there, because KV alone is not enough to go on from a prefix.

This module puts a mark into a copy of the chat after its instructions and tools, and after each text that the client
has marked. It renders that copy to find the places of the marks. The model never sees them.
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
"""The most ends of one prompt; later ones are left out."""


def mark_instructions(chat: Sequence[Message]) -> list[dict[str, Any]]:
    """The chat with a mark after its leading instructions and the tools: where the text of the first other message
    begins.
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
    """The number of a prompt's tokens before each mark, rising. `text` is the text of the prompt, and `render_marked`
    returns the text of the same chat with marks.

    Empty for a model without recurrent layers, and if the template refuses the marked chat or renders the rest of
    it differently.
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
