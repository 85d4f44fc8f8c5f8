"""Answers to a chat, whole or in chunks."""

from collections.abc import Iterable, Sequence
from typing import Any

from app.domain.values import TokenLogprobs
from app.messages import TurnFinished
from app.openai.answers import Entry, openai_finish_reason
from app.openai.chat import AnswerMessage, ChatChoice, ChatLogprobs, ChatTokenLogprob, TokenAlternative
from app.text.generation import TextChunk, TextItem
from app.text.tokenizer import Tokens


class ChatChunkWriter:
    """Writes the entries of `chat.completion.chunk`s.

    A choice's role comes with its first token and no earlier, so that clients who time the first chunk time the token.
    """

    def __init__(self, tokens: Tokens, *, logprobs: bool) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def entries(self, index: int, item: TextItem) -> Iterable[Entry]:
        """See `ChunkWriter`."""
        if not isinstance(item, TextChunk | TurnFinished):
            return
        if index not in self._begun:
            self._begun.add(index)
            yield _entry(index, {"role": "assistant", "content": ""})
        if isinstance(item, TurnFinished):
            yield _entry(index, {}, finish_reason=openai_finish_reason(item))
        elif self._logprobs:
            logprobs = _chat_logprobs(item.logprobs, self._tokens).model_dump()
            yield _entry(index, {"content": item.text}, logprobs=logprobs)
        elif item.text:
            yield _entry(index, {"content": item.text})


def whole_choice(index: int, entries: Sequence[Entry]) -> ChatChoice:
    """Put one choice together from its entries."""
    content = "".join(entry["delta"].get("content", "") for entry in entries)
    scored = [token for entry in entries if entry["logprobs"] for token in entry["logprobs"]["content"]]
    asked = any(entry["logprobs"] for entry in entries)
    return ChatChoice(
        index=index,
        message=AnswerMessage(content=content),
        logprobs=ChatLogprobs(content=scored) if asked else None,
        finish_reason=entries[-1]["finish_reason"],
    )


def _chat_logprobs(found: Iterable[TokenLogprobs], tokens: Tokens) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                **_alternative(tokens, entry.token_id, entry.logprob),
                top_logprobs=[TokenAlternative(**_alternative(tokens, *each)) for each in entry.top],
            )
            for entry in found
        ]
    )


def _alternative(tokens: Tokens, token_id: int, logprob: float) -> dict[str, Any]:
    text, utf8 = tokens.token_text(token_id), tokens.token_bytes(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(utf8)}


def _entry(
    index: int, delta: dict[str, str], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> Entry:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
