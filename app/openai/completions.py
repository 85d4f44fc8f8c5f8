"""`/v1/completions`: its body, its answers and their log-probabilities."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import orjson
from pydantic import BaseModel, Discriminator, Field, Tag

from app.domain.values import TokenLogprobs
from app.messages import PromptScored, TurnFinished
from app.openai.answers import Entry, openai_finish_reason
from app.openai.fields import MAX_TOP_LOGPROBS, GenerationFields, Usage
from app.text.generation import Detokenizer, TextChunk, TextItem
from app.text.tokenizer import Tokens
from app.wire.base import MAX_COUNT, LongList, TokenId
from app.wire.turns import is_none

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16

TokenIds = Annotated[LongList[TokenId], Field(min_length=1)]


def _prompt_form(prompt: object) -> str | None:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    match prompt, first:
        case list(), int():
            return "token ids"
        case list(), list():
            return "list of token ids"
        case list(), _:
            return "list of texts"
        case str(), _:
            return "one text"
        case _:
            return None


Prompt = Annotated[
    Annotated[str, Tag("one text")]
    | Annotated[LongList[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("list of texts")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[LongList[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("list of token ids")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt",
        custom_error_message="a string, a list of strings, token ids or a list of token ids",
    ),
]


class CompletionBody(GenerationFields):
    """Texts to go on with."""

    prompt: Prompt = Field(description="one prompt or several, each a text or token ids")
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, ge=0, le=MAX_COUNT, description="most tokens to generate")
    echo: bool = Field(False, description="the prompt is part of the text, and its tokens of the logprobs")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token; 0: only the token itself"
    )
    return_token_ids: bool = Field(False, description="add `token_ids` to each choice, as vLLM does")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever form they came in."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if _prompt_form(self.prompt) == "token ids":
            return [cast("list[int]", self.prompt)]
        return cast("list[str] | list[list[int]]", self.prompt)


class CompletionLogprobs(BaseModel):
    """Parallel lists, one entry per token.

    The first token of an echoed prompt has no log-probability. `text_offset` is how much of the choice's text was
    certain before the token: where its own text begins, unless bytes before it were not yet a character. A token that
    is not text by itself is written `bytes:\\xNN`, one `\\xNN` per byte.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One continuation; `index` counts the choices of the first prompt, then those of the second, and so on.

    `token_ids` are the generated tokens, there if the call asked for them.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = Field(None, exclude_if=is_none)


class Completion(BaseModel):
    """The continuations of one call. `system_fingerprint` changes when equal seeds may give other results."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


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


def whole_continuation(index: int, entries: Sequence[Entry], *, token_ids: bool) -> Entry:
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
