"""`/v1/completions`: its body and its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

from pydantic import Discriminator, Field, Tag

from app.domain.values import TokenLogprobs
from app.messages import PromptScored, TurnFinished
from app.openai.answers import ChunkWriter, Entry, openai_finish_reason
from app.openai.fields import MAX_TOP_LOGPROBS, GenerationFields
from app.openai.logprobs import Lists, LogprobsWriter, joined
from app.text.generation import TextChunk, TextItem
from app.text.tokenizer import Tokens
from app.wire.base import MAX_COUNT, LongList, TokenId

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


def prompts_of(given: Prompt) -> list[str] | list[list[int]]:
    """The prompts as a list, whichever form they came in."""
    if isinstance(given, str):
        return [given]
    if _prompt_form(given) == "token ids":
        return [cast("list[int]", given)]
    return cast("list[str] | list[list[int]]", given)


class CompletionBody(GenerationFields):
    """Texts to go on with."""

    prompt_field: ClassVar[str] = "prompt"
    has_chat: ClassVar[bool] = False

    prompt: Prompt = Field(description="one prompt or several, each a text or token ids")
    max_tokens: int | None = Field(DEFAULT_MAX_TOKENS, ge=0, le=MAX_COUNT, description="most tokens to generate")
    echo: bool = Field(False, description="the prompt is part of the text, and its tokens of the logprobs")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token; 0: only the token itself"
    )
    return_token_ids: bool = Field(False, description="add `token_ids` to each choice, as vLLM does")

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None to report nothing."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """Whether the answer tells of the prompt's tokens too."""
        return self.echo

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever form they came in."""
        return prompts_of(self.prompt)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is given back: its text, and the tokens that it became."""

    text: str
    token_ids: tuple[int, ...]


class CompletionChunkWriter(ChunkWriter):
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
            logprobs = self._writers[index].generated(item.logprobs) if self._logprobs else None
            entry = _entry(index, item.text, logprobs)
            entries.append(entry | {"token_ids": list(item.token_ids)} if self._token_ids else entry)
        return entries

    async def _echo(self, index: int, echo: Echo) -> Entry:
        if not self._logprobs:
            return _entry(index, echo.text)
        scored = self._scored.get(index // self._n, ())
        return _entry(index, echo.text, await self._writers[index].prompt(echo.text, echo.token_ids[0], scored))


def whole_continuation(index: int, entries: Sequence[Entry], *, token_ids: bool) -> Entry:
    """Put one choice together from its entries: a `CompletionChoice`, for `whole_json` to write."""
    scored = [entry["logprobs"] for entry in entries if entry["logprobs"] is not None]
    text = "".join(entry["text"] for entry in entries)
    whole = _entry(index, text, joined(scored) if scored else None, entries[-1]["finish_reason"])
    generated = [token for entry in entries for token in entry.get("token_ids", ())]
    return whole | {"token_ids": generated} if token_ids else whole


def _entry(index: int, text: str = "", logprobs: Lists | None = None, finish_reason: str | None = None) -> Entry:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
