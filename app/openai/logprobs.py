"""Log-probabilities as JSON. A long answer has millions of them, so none is an object for longer than it is written.

`bytes` are JSON that is written already: `orjson.dumps` takes them with `default=orjson.Fragment`.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from app.domain.values import TokenLogprobs
from app.text.generation import Detokenizer
from app.text.tokenizer import Tokens

SLICE = 128
"""Tokens of an echo that are written at a time: with 20 alternatives each, two milliseconds."""


def scored_token(found: TokenLogprobs, tokens: Tokens, *, with_bytes: bool = True) -> bytes:
    """One token with its alternatives: a `ChatTokenLogprob`, which is a `TextLogprob` too. Without bytes it is a
    `StreamedLogprob`.
    """

    def of(token_id: int, logprob: float) -> dict[str, Any]:
        shown = {"token": tokens.token_text(token_id), "logprob": logprob}
        return {**shown, "bytes": list(tokens.token_bytes(token_id))} if with_bytes else shown

    return orjson.dumps({**of(found.token_id, found.logprob), "top_logprobs": [of(*top) for top in found.top]})


def json_list(entries: Iterable[bytes | bytearray]) -> bytes:
    """A list of what is JSON already."""
    return b"[%b]" % b",".join(entries)


def one_list(lists: Iterable[bytes]) -> bytes:
    """The entries of several lists."""
    return json_list(inner for each in lists if (inner := each[1:-1]))


class ScoredText:
    """Collects those of a response's text that is still written."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._shown, self._streamed = bytearray(), bytearray()

    def take(self, found: Iterable[TokenLogprobs]) -> orjson.Fragment:
        """The next tokens; returns what the event that brings them tells: a list of `StreamedLogprob`s."""
        told = bytearray()
        for each in found:
            _append(self._shown, scored_token(each, self._tokens))
            _append(told, scored_token(each, self._tokens, with_bytes=False))
        _append(self._streamed, told)
        return orjson.Fragment(json_list([told]))

    @property
    def streamed(self) -> orjson.Fragment:
        """What the event at the end tells of all of them."""
        return orjson.Fragment(json_list([self._streamed]))

    @property
    def shown(self) -> bytes:
        """All of them as the text has them: a list of `TextLogprob`s."""
        return json_list([self._shown])


def _append(written: bytearray, more: bytes | bytearray) -> None:
    if written and more:
        written += b","
    written += more


Lists = Mapping[str, bytes]
"""The `CompletionLogprobs` of some tokens: each of its lists."""


def joined(parts: Sequence[Lists]) -> Lists:
    """Those of some tokens, and of the tokens after them."""
    return {name: one_list(each[name] for each in parts) for name in parts[0]}


class LogprobsWriter:
    """Writes one continuation's log-probabilities piece by piece, and keeps count of the text for `text_offset`."""

    def __init__(self, tokens: Tokens, *, echoed: bool) -> None:
        """`echoed` if the prompt's come first."""
        self._tokens = tokens
        self._stream = Detokenizer(tokens, after_text=not echoed)
        self._length = 0

    async def prompt(self, text: str, first: int, scored: Sequence[TokenLogprobs]) -> Lists:
        """Those of an echoed prompt. Nothing predicts its `first` token; `scored` goes on with the second. Others have
        turns of the event loop meanwhile.
        """
        parts = [self._lists([(first, None, None)])]
        for begin in range(0, len(scored), SLICE):
            await asyncio.sleep(0)
            parts.append(self.generated(scored[begin : begin + SLICE]))
        self._length = len(text)
        return joined(parts)

    def generated(self, found: Iterable[TokenLogprobs]) -> Lists:
        """Those of the next tokens."""
        return self._lists((each.token_id, each.logprob, self._top(each)) for each in found)

    def _lists(self, rows: Iterable[tuple[int, float | None, dict[str, float] | None]]) -> Lists:
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprob, top in rows:
            for entries, entry in zip(lists.values(), (self._text(token_id), logprob, top, self._length), strict=True):
                entries.append(entry)
            self._length += len(self._stream.push((token_id,)))
        return {name: orjson.dumps(entries) for name, entries in lists.items()}

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*found.top, (found.token_id, found.logprob)):
            top.setdefault(self._text(token_id), logprob)  # of two tokens with one text, the likelier
        return top

    def _text(self, token_id: int) -> str:
        token_bytes = self._tokens.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
