"""What requests and answers of the OpenAI surface have in common."""

from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from app.domain.values import TurnUsage
from app.wire.extras.body import OpenBody
from app.wire.turns import MAX_SEED, SamplingFields

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


class StreamOptions(OpenBody):
    """Options of a streamed answer."""

    include_usage: bool = Field(False, description="end with a chunk that has the usage and no choices")
    continuous_usage_stats: bool = Field(
        False, description="every chunk has its choice's usage so far, as in vLLM; only with include_usage"
    )

    def without_effect(self) -> Iterable[str]:
        """See `OpenBody`."""
        return ["continuous_usage_stats"] if self.continuous_usage_stats and not self.include_usage else []


class GenerationFields(SamplingFields, OpenBody):
    """The fields that both generating routes share.

    A `seed` may be any integer. Seeds from 0 to 2^63 - 1 are taken as they are; any other is taken modulo 2^63, so
    that -1 is the seed 2^63 - 1.
    """

    model: str = Field(description="the served model's name, as /v1/models gives it")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices per prompt")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    seed: int | None = Field(
        None, description="any integer: outside 0 to 2^63 - 1 it is taken modulo 2^63; drawn by the server if absent"
    )
    user: str | None = Field(
        None,
        max_length=512,
        description="the caller's name for its end user: metadata of a session that the call opens; ignored where the "
        "call is bound to a session that is open already, which keeps its own",
    )

    @field_validator("seed")
    @classmethod
    def _take_modulo(cls, seed: int) -> int:
        return seed % (MAX_SEED + 1)

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, options: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if info.data.get("stream") is False:
            raise ValueError("only allowed with stream")
        return options

    @property
    def shown_usage(self) -> StreamOptions:
        """What a stream is to tell of the usage."""
        return self.stream_options or StreamOptions()


class PromptTokensDetails(BaseModel):
    """Where the prompt's KV came from."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one call. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompts: Iterable[TurnUsage], choices: Iterable[TurnUsage]) -> Self:
        """Sum up a call. `prompts` are the usages of each prompt's first choice, `choices` those of all choices."""
        first = list(prompts)
        return cls.of_tokens(
            prompt=sum(usage.prompt_tokens for usage in first),
            completion=sum(usage.completion_tokens for usage in choices),
            cached=sum(usage.cached_tokens for usage in first),
        )

    @classmethod
    def of_tokens(cls, *, prompt: int, completion: int, cached: int) -> Self:
        """So many tokens of prompts, `cached` of which had their KV already, and of completions."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )
