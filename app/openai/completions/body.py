"""The bodies of `/v1/completions`."""

from typing import Annotated, Literal, cast

from pydantic import BaseModel, Discriminator, Field, Tag

from app.openai.fields import MAX_TOP_LOGPROBS, GenerationFields, Usage
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
