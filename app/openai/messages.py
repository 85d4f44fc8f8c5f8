"""The messages of a chat as clients send them, and as chat templates read them."""

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from typing_extensions import TypeAliasType

from app.openai.fields import NullIsAbsent
from app.wire.base import WireModel


class TextPart(WireModel):
    """One part of a message's content; only text, the models served here neither see nor hear."""

    type: Literal["text"]
    text: str


def _content_form(content: object) -> str:
    return "list of parts" if isinstance(content, list) else "plain text"


Content = TypeAliasType(
    "Content",
    Annotated[
        Annotated[str, Tag("plain text")] | Annotated[list[TextPart], Field(min_length=1), Tag("list of parts")],
        Discriminator(_content_form),
    ],
)
Name = Annotated[str, Field(min_length=1, max_length=256)]


class SystemMessage(NullIsAbsent):
    """Instructions. `developer` is OpenAI's newer word for `system`; chat templates know only the older one."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return _template_message("system", self.content, name=self.name)


class UserMessage(NullIsAbsent):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return _template_message("user", self.content, name=self.name)


class FunctionCall(WireModel):
    """A function with its arguments, the text of a JSON object."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_json_object(cls, arguments: str) -> str:
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"the text of a JSON object; got invalid JSON at character {error.pos}") from None
        if not isinstance(parsed, dict):
            raise ValueError("the text of a JSON object")
        return arguments


class ToolCall(WireModel):
    """A call that the assistant made earlier in the chat."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(NullIsAbsent):
    """What the model said earlier.

    The fields that can only be null or empty are those that SDKs send back as they got them.
    """

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    name: Name | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[None], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.tool_calls is None:
            raise ValueError("content is required unless there are tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it, the arguments of its tool calls as objects."""
        calls = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": orjson.loads(call.function.arguments)},
            }
            for call in self.tool_calls or ()
        ]
        return _template_message("assistant", self.content or "", name=self.name, tool_calls=calls or None)


class ToolMessage(NullIsAbsent):
    """What a tool answered to the call of that id."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        return _template_message("tool", self.content, tool_call_id=self.tool_call_id)


def _role_of(message: object) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return "system message" if role == "developer" else f"{role} message"


Message = TypeAliasType(
    "Message",
    Annotated[
        Annotated[SystemMessage, Tag("system message")]
        | Annotated[UserMessage, Tag("user message")]
        | Annotated[AssistantMessage, Tag("assistant message")]
        | Annotated[ToolMessage, Tag("tool message")],
        Discriminator(
            _role_of,
            custom_error_type="role",
            custom_error_message="a message with role system, developer, user, assistant or tool",
        ),
    ],
)


def _template_message(role: str, content: str | list[TextPart], **optional: object) -> dict[str, Any]:
    """Templates test for the optional keys, so those without a value are left out. Text parts are lines, as in vLLM."""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return {"role": role, "content": text} | {key: value for key, value in optional.items() if value is not None}
