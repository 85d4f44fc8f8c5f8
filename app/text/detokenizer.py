"""Where a token becomes text: the tokens of one turn are decoded as they come."""

import codecs
from collections.abc import Sequence

from app.text.tokenizer import Tokens


class Detokenizer:
    """The text of one turn, piece by piece, without special tokens but those that are `shown`.

    What `push` returns, with one `flush` at the end, makes up `Tokens.decode` of all the tokens: a character that
    is not complete is held back. (In a byte-fallback vocabulary, bytes that are not UTF-8 are the exception:
    there `decode` takes back whole characters before the bad byte, and text that was sent cannot be.) Text that goes on
    `after_text` keeps a leading space that the decoders of SentencePiece models take from the start of a text.
    """

    def __init__(self, tokens: Tokens, *, after_text: bool, shown: frozenset[int] = frozenset()) -> None:
        """`after_text` says whether the tokens go on from text before them."""
        self._tokens = tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokens.drops_first_space and not after_text

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text they complete, which may be empty."""
        return self._decode(b"".join(map(self._text_bytes, token_ids)))

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was never completed."""
        return self._decode(b"", final=True)

    def _text_bytes(self, token_id: int) -> bytes:
        return self._tokens.token_bytes(token_id) if token_id in self._shown else self._tokens.text_bytes(token_id)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def whole_pieces(tokens: Tokens, token_ids: Sequence[int]) -> list[str]:
    """The text of a history, cut at its tokens, special ones included: what each completes. A character belongs to the
    token that has its last byte.
    """
    reading = Detokenizer(tokens, after_text=False, shown=tokens.special_ids)
    pieces = [reading.push([token_id]) for token_id in token_ids]
    if pieces:
        pieces[-1] += reading.flush()
    return pieces
