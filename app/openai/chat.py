"""The bodies of `/v1/chat/completions`."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar
from app.openai.fields import MAX_TOP_LOGPROBS, GenerationFields, Usage
from app.openai.messages import Message
from app.openai.structured import ResponseFormat
from app.wire.base import MAX_COUNT
from app.wire.sessions import Metadata


class ChatBody(GenerationFields):
    """A chat to answer.

    SDKs send some fields with values that ask for nothing: of what is not supported, only those are taken.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="the newer name of max_tokens")
    logprobs: bool = Field(False, description="report each token's log-probability")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token; only with logprobs"
    )
    response_format: ResponseFormat | None = Field(None, description="the form that the answer must have")
    metadata: Metadata | None = Field(
        None, description="the caller's own labels; a whole answer returns them, a stream does not"
    )
    store: Literal[False] = Field(False, description="answers are not stored")
    tools: Annotated[list[None], Field(max_length=0)] = Field(default=[], description="not supported: none")
    tool_choice: Literal["none", "auto"] = Field("none", description="there are no tools to choose from")
    parallel_tool_calls: bool = Field(True, description="there are no tools to call")
    service_tier: Literal["auto", "default"] = Field("auto", description="there is one")
    prediction: None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] = Field(default=["text"])

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, top_logprobs: int, info: ValidationInfo) -> int:
        if info.data.get("logprobs") is False:
            raise ValueError("only allowed with logprobs")
        return top_logprobs

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_the_only_limit(cls, max_completion_tokens: int, info: ValidationInfo) -> int:
        if info.data.get("max_tokens") is not None:
            raise ValueError("is the same field as max_tokens; give only one of them")
        return max_completion_tokens

    def to_grammar(self) -> Grammar | None:
        """What the answer must match, from `response_format` or `structured_outputs`."""
        asked = None if self.response_format is None else self.response_format.to_grammar()
        if asked is not None and self.structured_outputs is not None:
            raise FieldOutOfRange("give only one of response_format and structured_outputs", param="response_format")
        return asked or super().to_grammar()

    @property
    def token_limit(self) -> int | None:
        """`max_tokens` under either name."""
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def limit_field(self) -> str:
        """The name under which `token_limit` came."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None to report nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenAlternative(BaseModel):
    """A token that could stand at a position. `bytes` are its UTF-8 bytes: a character can span tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenAlternative):
    """The token that stands at a position, and the most likely ones there, best first."""

    top_logprobs: list[TokenAlternative]


class ChatLogprobs(BaseModel):
    """One entry for each generated token, those that ended the answer included."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answers to one chat. `system_fingerprint` changes when equal seeds may give other results."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: Metadata | None
