"""What requests and answers of the OpenAI surface have in common."""

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from app.domain.values import TurnUsage
from app.wire.base import WireModel
from app.wire.turns import SamplingFields

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


def _allow_null(schema: dict[str, Any]) -> None:
    """Say in the JSON schema what `NullIsAbsent` does."""
    fields: dict[str, dict[str, Any]] = schema["properties"]
    for name in fields.keys() - set(schema.get("required", ())):
        about = {key: value for key, value in fields[name].items() if key in ("title", "description", "default")}
        rest = {key: value for key, value in fields[name].items() if key not in about}
        fields[name] = about | {"anyOf": [rest, {"type": "null"}]}


class NullIsAbsent(WireModel):
    """A body whose optional fields may also be null, which means the same as leaving them out.

    The OpenAI API documents nearly all of its fields so, and SDK users pass `None` to them.
    """

    model_config = ConfigDict(json_schema_extra=_allow_null)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in optional}


class StreamOptions(NullIsAbsent):
    """Options of a streamed answer."""

    include_usage: bool = Field(False, description="end with a chunk that has the usage and no choices")
    continuous_usage_stats: bool = Field(
        False, description="every chunk has its choice's usage so far, as in vLLM; only with include_usage"
    )
    include_obfuscation: Literal[False] = Field(False, description="events are never padded")

    @field_validator("continuous_usage_stats")
    @classmethod
    def _needs_usage(cls, continuous: bool, info: ValidationInfo) -> bool:
        if continuous and not info.data.get("include_usage"):
            raise ValueError("only allowed with include_usage")
        return continuous


class GenerationFields(NullIsAbsent, SamplingFields):
    """The fields that both generating routes share."""

    model: str = Field(description="the served model's name, as /v1/models gives it")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices per prompt")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    user: str | None = Field(
        None,
        max_length=512,
        description="the caller's name for its end user: metadata of a session that the call opens; ignored where the "
        "call is bound to a session that is open already, which keeps its own",
    )

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
