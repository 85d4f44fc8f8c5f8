"""Conversations that the server holds between calls of `/v1/messages`, so that each call brings only what is new.

They are in memory. A client that is told that one is not here sends its whole conversation again, as the official SDK
does by itself.
"""

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from app.anthropic.messages import AssistantInput, MessageInput, MessagesBody, MessagesTool, SystemContent
from app.domain.errors import ThreadNotFound

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Of all threads."""
MESSAGE_BYTES = 2 << 10
"""What a message takes beside its text: about so much in objects."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A conversation up to an answer, with the instructions and tools that it began with."""

    system: SystemContent | None
    tools: list[MessagesTool]
    messages: Sequence[MessageInput]
    size: int
    """Bytes, about."""


class Threads:
    """Those of all owners, by the id of the last answer. Where they are too many, the owner with the most bytes loses
    the thread that has not gone on for the longest time. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._held = defaultdict[str | None, OrderedDict[str, Thread]](OrderedDict)
        self._sizes = Counter[str | None]()
        """Bytes of each owner."""

    def resume(self, owner: str | None, body: MessagesBody) -> MessagesBody:
        """The whole conversation that a call goes on with. Raises `ThreadNotFound`."""
        if (last := body.continues_thread) is None:
            return body
        thread = self._held[owner].get(last)
        if thread is None:
            raise ThreadNotFound(
                f"thread.previous_message_id: no thread ends with {last}. It has gone on, or is held no more: send the "
                "whole conversation again",
                param="thread.previous_message_id",
            )
        return body.with_thread(thread.system, thread.tools, thread.messages)

    def keep(self, owner: str | None, body: MessagesBody, answer: dict[str, Any]) -> None:
        """Hold the whole conversation of `body` and its `answer`, in the place of the thread that it has resumed. Of
        what cannot be held the client's next call is told that it is not here.
        """
        try:
            said = AssistantInput.model_validate({"role": "assistant", "content": answer["content"]})
            messages, before = [*body.messages, said], self._drop(owner, body.continues_thread)
            new = messages[len(before.messages) :] if before is not None else [body.system, body.tools, messages]
            size = len(to_json(new, inf_nan_mode="null")) + MESSAGE_BYTES * len(messages)
        except ValueError as error:
            logger.warning("a thread is not held: %s", error)
            return
        size += 0 if before is None else before.size - MESSAGE_BYTES * len(before.messages)
        self._held[owner][answer["id"]] = Thread(body.system, body.tools, messages, size)
        self._sizes[owner] += size
        while self._sizes.total() > MAX_BYTES:
            [(largest, _)] = self._sizes.most_common(1)
            self._drop(largest, next(iter(self._held[largest])))

    def _drop(self, owner: str | None, last: str | None) -> Thread | None:
        thread = None if last is None else self._held[owner].pop(last, None)
        if thread is not None:
            self._sizes[owner] -= thread.size
        return thread
