"""Log-probabilities of a response's text. A long text has millions, so they are JSON from the moment that their token
comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.domain.values import TokenLogprobs
from app.openai.responses.encoded import Encoded
from app.text.tokenizer import Tokens


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One token as JSON: a `TextLogprob`, and a `StreamedLogprob`, which has no bytes."""

    shown: bytes
    streamed: bytes

    @classmethod
    def of(cls, found: TokenLogprobs, tokens: Tokens) -> ScoredToken:
        """The token with its alternatives."""
        top = [_token(tokens, *each) for each in found.top]
        token = _token(tokens, found.token_id, found.logprob)
        shown = orjson.dumps({**token, "top_logprobs": top})
        for each in (token, *top):
            del each["bytes"]
        return cls(shown, orjson.dumps({**token, "top_logprobs": top}))


class ScoredText:
    """Collects those of a text that is still written."""

    def __init__(self) -> None:
        self._shown = bytearray()
        self._streamed = bytearray()

    def take(self, found: Sequence[ScoredToken]) -> orjson.Fragment:
        """The next tokens; returns what the event that brings them tells: a list of `StreamedLogprob`s."""
        for each in found:
            self._shown += (b"," if self._shown else b"") + each.shown
            self._streamed += (b"," if self._streamed else b"") + each.streamed
        return orjson.Fragment(_list(b",".join([each.streamed for each in found])))

    @property
    def streamed(self) -> orjson.Fragment:
        """What the event at the end tells of all of them."""
        return orjson.Fragment(_list(self._streamed))

    @property
    def shown(self) -> Encoded:
        """All of them as the text has them: a list of `TextLogprob`s."""
        return Encoded(_list(self._shown))


def _token(tokens: Tokens, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.token_text(token_id), "logprob": logprob, "bytes": list(tokens.token_bytes(token_id))}


def _list(entries: bytes | bytearray) -> bytes:
    return b"".join((b"[", entries, b"]"))
