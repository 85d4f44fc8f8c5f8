"""The bodies of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.openai.fields import (
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    FunctionTool,
    GenerationFields,
    ResponseFormat,
    ToolChoice,
    Usage,
    parallel_without_effect,
    tool_use,
)
from app.tools.definitions import ToolUse
from app.tools.support import ToolSupport, form_without_effect, turn_grammar
from app.wire.base import MAX_COUNT, LongList
from app.wire.extras import OpenBody, asks_for
from app.wire.sessions import Metadata
from app.wire.turns import is_none


class TextPart(OpenBody):
    """One part of a message's content; only text, the models served here neither see nor hear."""

    type: Literal["text"]
    text: str


class RefusalPart(OpenBody):
    """A part in which the model said that it would not answer: text too."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


def _content_form(content: object) -> str:
    return "list of parts" if isinstance(content, list) else "plain text"


def _part_form(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "refusal part" if kind == "refusal" else "text part"


AssistantPart = TypeAliasType(
    "AssistantPart",
    Annotated[
        Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")], Discriminator(_part_form)
    ],
)
Content = TypeAliasType(
    "Content",
    Annotated[
        Annotated[str, Tag("plain text")] | Annotated[LongList[TextPart], Field(min_length=1), Tag("list of parts")],
        Discriminator(_content_form),
    ],
)
AssistantContent = TypeAliasType(
    "AssistantContent",
    Annotated[
        Annotated[str, Tag("plain text")]
        | Annotated[LongList[AssistantPart], Field(min_length=1), Tag("list of parts")],
        Discriminator(_content_form),
    ],
)


def text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The content as one text: parts are lines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


Name = Annotated[str, Field(min_length=1, max_length=256)]


class MessageBody(OpenBody):
    """A message. Chat templates read its unknown fields too."""

    reads_extras: ClassVar[bool] = True

    def _for_template(self, role: str, text: str | None, **optional: object) -> dict[str, Any]:
        """Templates test for the optional keys, so those without a value are left out."""
        extras = {name: value for name, value in (self.model_extra or {}).items() if asks_for("messages", name, value)}
        known = {"content": text, **optional}
        return {**extras, "role": role} | {name: value for name, value in known.items() if value is not None}


class SystemMessage(MessageBody):
    """Instructions. `developer` is OpenAI's newer word for `system`; chat templates know only the older one."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return self._for_template("system", text_of(self.content), name=self.name)


class UserMessage(MessageBody):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return self._for_template("user", text_of(self.content), name=self.name)


class FunctionCall(OpenBody):
    """A function with its arguments: any text, since a model may have run out of tokens in the middle of them."""

    name: str
    arguments: str


class ToolCall(OpenBody):
    """A call that the assistant made earlier in the chat."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(MessageBody):
    """What the model said earlier. A `refusal` is a part of the content."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    refusal: str | None = None
    tool_calls: LongList[ToolCall] | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError("content is required unless there are tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it, but that the arguments of its calls are still text."""
        calls = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in self.tool_calls or ()
        ]
        texts = [] if self.content is None else [text_of(self.content)]
        texts += [] if self.refusal is None else [self.refusal]
        return self._for_template("assistant", "\n".join(texts), name=self.name, tool_calls=calls or None)


class ToolMessage(MessageBody):
    """What a tool answered to the call of that id."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return self._for_template("tool", text_of(self.content), tool_call_id=self.tool_call_id)


ROLE_TAGS = {
    "system": "system message",
    "developer": "system message",
    "user": "user message",
    "assistant": "assistant message",
    "tool": "tool message",
}
"""By role: the form of a message."""


class CustomMessage(MessageBody):
    """A message of another role, which is for the model's chat template to understand."""

    role: str = Field(min_length=1, max_length=64, json_schema_extra={"not": {"enum": list(ROLE_TAGS)}})
    content: Content | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: as it came, its text parts joined."""
        return self._for_template(self.role, None if self.content is None else text_of(self.content))


def _form_of(message: object) -> str | None:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    if isinstance(role, str):
        return ROLE_TAGS.get(role, "custom message")
    return "custom message" if isinstance(message, dict) else None


Message = TypeAliasType(
    "Message",
    Annotated[
        Annotated[SystemMessage, Tag("system message")]
        | Annotated[UserMessage, Tag("user message")]
        | Annotated[AssistantMessage, Tag("assistant message")]
        | Annotated[ToolMessage, Tag("tool message")]
        | Annotated[CustomMessage, Tag("custom message")],
        Discriminator(_form_of, custom_error_type="role", custom_error_message="an object with a role and a content"),
    ],
)


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
