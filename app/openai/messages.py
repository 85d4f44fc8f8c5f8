"""The messages of a chat as clients send them, and as chat templates read them."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from app.openai.content import AssistantContent, Content, text_of
from app.wire.base import LongList
from app.wire.extras.body import OpenBody
from app.wire.extras.unsupported import asks_for

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
