"""Log-probabilities in the form of `/v1/completions`."""

import asyncio
from collections.abc import Iterable, Sequence

import orjson

from app.domain.values import TokenLogprobs
from app.openai.completions.body import CompletionLogprobs
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokens

SLICE = 128
"""Tokens of an echo that are written at a time: with 20 alternatives each, two milliseconds."""


class WrittenLogprobs:
    """The `CompletionLogprobs` of some tokens as JSON. A long prompt has millions of them, so they are no objects."""

    def __init__(self) -> None:
        self._lists = {name: bytearray() for name in CompletionLogprobs.model_fields}

    def add(self, found: CompletionLogprobs) -> None:
        """Write those of the next tokens."""
        for name, written in self._lists.items():
            _extend(written, orjson.dumps(getattr(found, name))[1:-1])

    def join(self, others: Iterable["WrittenLogprobs"]) -> "WrittenLogprobs":
        """These, and the others after them."""
        for each in others:
            for name, written in self._lists.items():
                _extend(written, each._lists[name])
        return self

    def fragment(self) -> orjson.Fragment:
        """The JSON."""
        parts: list[bytes | bytearray] = []
        for name, written in self._lists.items():
            parts += (b",", b'"%b":[' % name.encode(), written, b"]")
        return orjson.Fragment(b"".join((b"{", *parts[1:], b"}")))


class LogprobsWriter:
    """Writes one choice's log-probabilities piece by piece, and keeps count of the text for `text_offset`."""

    def __init__(self, tokens: Tokens, *, echoed: bool) -> None:
        """`echoed` if the prompt's come first."""
        self._tokens = tokens
        self._stream = Detokenizer(tokens, after_text=not echoed)
        self._length = 0

    async def prompt(self, text: str, first: int, scored: Sequence[TokenLogprobs]) -> WrittenLogprobs:
        """Those of an echoed prompt. Nothing predicts its `first` token; `scored` goes on with the second. Others have
        turns of the event loop meanwhile.
        """
        written, unpredicted = WrittenLogprobs(), _nothing()
        self._append_token(unpredicted, first)
        unpredicted.token_logprobs.append(None)
        unpredicted.top_logprobs.append(None)
        written.add(unpredicted)
        for begin in range(0, len(scored), SLICE):
            await asyncio.sleep(0)
            written.add(self._lists(scored[begin : begin + SLICE]))
        self._length = len(text)
        return written

    def generated(self, found: Iterable[TokenLogprobs]) -> WrittenLogprobs:
        """Those of the next generated tokens."""
        written = WrittenLogprobs()
        written.add(self._lists(found))
        return written

    def _lists(self, found: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        lists = _nothing()
        for entry in found:
            self._append_token(lists, entry.token_id)
            lists.token_logprobs.append(entry.logprob)
            top: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                top.setdefault(self._text(token_id), logprob)  # of two tokens with one text, the likelier
            lists.top_logprobs.append(top)
        return lists

    def _append_token(self, lists: CompletionLogprobs, token_id: int) -> None:
        lists.tokens.append(self._text(token_id))
        lists.text_offset.append(self._length)
        self._length += len(self._stream.push((token_id,)))

    def _text(self, token_id: int) -> str:
        token_bytes = self._tokens.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _nothing() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _extend(written: bytearray, more: bytes | bytearray) -> None:
    if written and more:
        written += b","
    written += more
