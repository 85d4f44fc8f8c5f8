"""Continuations of a prompt, whole or in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.values import TokenLogprobs
from app.messages import PromptScored, TurnFinished
from app.openai.answers import Entry, openai_finish_reason
from app.openai.completions.body import CompletionChoice
from app.openai.completions.logprobs import LogprobsWriter, WrittenLogprobs
from app.text.generation import TextChunk, TextItem
from app.text.tokenizer import Tokens


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back: its text, and the tokens that it became."""

    text: str
    token_ids: tuple[int, ...]


class CompletionChunkWriter:
    """Writes the entries of `text_completion` chunks; the first of each choice brings the echo, if one is wanted."""

    def __init__(
        self, tokens: Tokens, *, n: int, echoes: Sequence[Echo] | None, logprobs: bool, token_ids: bool
    ) -> None:
        """`echoes` has one entry per prompt; choice `index` belongs to prompt `index // n`."""
        self._tokens = tokens
        self._n = n
        self._echoes = echoes
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._scored: dict[int, Sequence[TokenLogprobs]] = {}
        self._writers: dict[int, LogprobsWriter] = {}

    async def entries(self, index: int, item: TextItem) -> Sequence[Entry]:
        """See `ChunkWriter`."""
        if isinstance(item, PromptScored):
            self._scored[index // self._n] = item.logprobs
        if not isinstance(item, TextChunk | TurnFinished):
            return ()
        entries = []
        if index not in self._writers:
            self._writers[index] = LogprobsWriter(self._tokens, echoed=self._echoes is not None)
            if self._echoes is not None:
                entries.append(await self._echo(index, self._echoes[index // self._n]))
        if isinstance(item, TurnFinished):
            entries.append(_entry(index, finish_reason=openai_finish_reason(item)))
        elif self._logprobs or self._token_ids or item.text:
            entries.append(self._chunk(index, item))
        return entries

    def _chunk(self, index: int, chunk: TextChunk) -> Entry:
        logprobs = self._writers[index].generated(chunk.logprobs) if self._logprobs else None
        entry = _entry(index, chunk.text, logprobs)
        return entry | {"token_ids": list(chunk.token_ids)} if self._token_ids else entry

    async def _echo(self, index: int, echo: Echo) -> Entry:
        if not self._logprobs:
            return _entry(index, echo.text)
        scored = self._scored.get(index // self._n, ())
        return _entry(index, echo.text, await self._writers[index].prompt(echo.text, echo.token_ids[0], scored))


def whole_choice(index: int, entries: Sequence[Entry], *, token_ids: bool) -> Entry:
    """Put one choice together from its entries: a `CompletionChoice`, for `whole_json` to write."""
    choice = CompletionChoice(
        index=index,
        text="".join(entry["text"] for entry in entries),
        logprobs=None,
        finish_reason=entries[-1]["finish_reason"],
        token_ids=[token for entry in entries for token in entry.get("token_ids", ())] if token_ids else None,
    )
    scored = [entry["logprobs"] for entry in entries if entry["logprobs"] is not None]
    return choice.model_dump() | {"logprobs": WrittenLogprobs().join(scored) if scored else None}


def _entry(
    index: int, text: str = "", logprobs: WrittenLogprobs | None = None, finish_reason: str | None = None
) -> Entry:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
