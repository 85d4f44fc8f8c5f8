"""The bodies of `/v1/chat/completions`."""

from typing import Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar
from app.openai.fields import MAX_TOP_LOGPROBS, GenerationFields, Usage
from app.openai.messages import Message
from app.openai.structured import ResponseFormat
from app.openai.tools import MAX_TOOLS, FunctionTool, ToolChoice, parallel_without_effect, tool_use
from app.tools.definitions import ToolUse
from app.tools.support import ToolSupport, form_without_effect, turn_grammar
from app.wire.base import MAX_COUNT, LongList
from app.wire.sessions import Metadata
from app.wire.turns import is_none


class ChatBody(GenerationFields):
    """A chat to answer."""

    messages: LongList[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="the newer name of max_tokens")
    logprobs: bool = Field(False, description="report each token's log-probability")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token; only with logprobs"
    )
    response_format: ResponseFormat | None = Field(None, description="the form that the answer must have")
    metadata: Metadata | None = Field(
        None, description="the caller's own labels; a whole answer returns them, a stream does not"
    )
    tools: list[FunctionTool] = Field(default=[], max_length=MAX_TOOLS, description="functions to call")
    tool_choice: ToolChoice | None = Field(None, description="what is called (default: auto with tools, else none)")
    parallel_tool_calls: bool = Field(True, description="an answer may hold several calls")

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

    def without_effect(self) -> list[str]:
        """See `OpenBody`."""
        form = form_without_effect(self.to_grammar(), self.to_tool_use())
        return [
            *super().without_effect(),
            *form,
            *parallel_without_effect(self.tools, parallel=self.parallel_tool_calls),
        ]

    def to_grammar(self) -> Grammar | None:
        """What the answer must match, from `response_format` or `structured_outputs`."""
        asked = None if self.response_format is None else self.response_format.to_grammar()
        if asked is not None and self.structured_outputs is not None:
            raise FieldOutOfRange("give only one of response_format and structured_outputs", param="response_format")
        return asked or super().to_grammar()

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return tool_use([tool.to_tool() for tool in self.tools], self.tool_choice, parallel=self.parallel_tool_calls)

    def to_turn_grammar(self, use: ToolUse, support: ToolSupport) -> Grammar | None:
        """What holds the turn: the form of the answer, the calls that it may make, or either of them.

        Raises `FieldOutOfRange` for a form that cannot stand beside calls.
        """
        return turn_grammar(self.to_grammar(), use, support)

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


class AnswerFunction(BaseModel):
    """A function and its arguments: the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A call that the client is to make; it sends the result in a message with this id."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null where the answer is only calls")
    refusal: None = None
    tool_calls: list[AnswerToolCall] | None = Field(None, exclude_if=is_none)


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


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
