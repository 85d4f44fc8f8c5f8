"""What the server may be asked, and what goes from it to a generator and back."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    """Nothing is accepted and ignored."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Strict):
    """OpenAI's."""

    include_usage: bool = False


class CompletionRequest(_Strict):
    """The part of OpenAI's completions that a load generator needs: greedy ones."""

    model: str
    prompt: str | list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    temperature: Literal[0] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams alone")
        return self


class TokenizeRequest(_Strict):
    """vLLM's."""

    prompt: str
    add_special_tokens: bool = True
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Tokens in, and how many to generate after them; `ignore_eos`: regardless of the end-of-text token."""

    prompt: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool


class GenerationFailed(Exception):
    """The generator could not go on; the message says why."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A job in a queue, and where its tokens go: None is the end, an exception the reason why there are no more."""

    job: Job
    abandoned: bool = False
    tokens: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)

    async def read(self) -> AsyncGenerator[int]:
        """The tokens as they come. Raises `GenerationFailed`."""
        try:
            while (token := await self.tokens.get()) is not None:
                if isinstance(token, Exception):
                    raise GenerationFailed(str(token)) from token
                yield token
        finally:
            self.abandoned = True
