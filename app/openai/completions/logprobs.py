"""Log-probabilities in the form of `/v1/completions`."""

from collections.abc import Iterable, Sequence

from app.domain.values import TokenLogprobs
from app.openai.completions.body import CompletionLogprobs
from app.text.detokenizer import Detokenizer
from app.text.tokenizer import Tokens


class LogprobsWriter:
    """Writes one choice's log-probabilities piece by piece, and keeps count of the text for `text_offset`."""

    def __init__(self, tokens: Tokens, *, echoed: bool) -> None:
        """`echoed` if the prompt's come first."""
        self._tokens = tokens
        self._stream = Detokenizer(tokens, after_text=not echoed)
        self._length = 0

    def prompt(self, text: str, first: int, scored: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Those of an echoed prompt. Nothing predicts its `first` token; `scored` goes on with the second."""
        written = nothing()
        self._append_token(written, first)
        written.token_logprobs.append(None)
        written.top_logprobs.append(None)
        self._append(written, scored)
        self._length = len(text)
        return written

    def generated(self, found: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """Those of the next generated tokens."""
        written = nothing()
        self._append(written, found)
        return written

    def _append(self, written: CompletionLogprobs, found: Iterable[TokenLogprobs]) -> None:
        for entry in found:
            self._append_token(written, entry.token_id)
            written.token_logprobs.append(entry.logprob)
            top: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                top.setdefault(self._text(token_id), logprob)  # of two tokens with one text, the likelier
            written.top_logprobs.append(top)

    def _append_token(self, written: CompletionLogprobs, token_id: int) -> None:
        written.tokens.append(self._text(token_id))
        written.text_offset.append(self._length)
        self._length += len(self._stream.push((token_id,)))

    def _text(self, token_id: int) -> str:
        token_bytes = self._tokens.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def nothing() -> CompletionLogprobs:
    """The log-probabilities of no tokens."""
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def joined(pieces: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """The pieces one after the other."""
    whole = nothing()
    for piece in pieces:
        whole.tokens += piece.tokens
        whole.token_logprobs += piece.token_logprobs
        whole.top_logprobs += piece.top_logprobs
        whole.text_offset += piece.text_offset
    return whole
