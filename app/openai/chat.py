"""The bodies of `/v1/chat/completions`, and their prompt: the tokens of a chat, and which fields of its messages the
chat template leaves out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.domain.values import Grammar
from app.openai.fields import (
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    FunctionTool,
    GenerationFields,
    ReasoningEffort,
    ResponseFormat,
    TemplateVariables,
    ThinkingBudget,
    ToolChoice,
    parallel_without_effect,
    tool_use,
)
from app.text.tokenizer import CharacterLimit, TextLimit, Tokens
from app.tools.definitions import Tool, ToolUse, mark_instructions
from app.tools.replay import Chat, ChatPrompt
from app.tools.support import ToolSupport
from app.tools.thinking import Wish
from app.wire.base import MAX_COUNT, LongList, TextOrList, type_of
from app.wire.calls import IMAGE_LEFT_OUT, OpenBody, asks_for
from app.wire.sessions import Metadata


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


class ImagePart(OpenBody):
    """An image, which no model here sees: a text stands in its place."""

    reads_extras: ClassVar[bool] = True

    type: Literal["image_url"]

    @property
    def text(self) -> str:
        """What the model reads."""
        return IMAGE_LEFT_OUT


Part = TypeAliasType(
    "Part",
    Annotated[
        Annotated[TextPart, Tag("text part")] | Annotated[ImagePart, Tag("image part")],
        Discriminator(lambda part: "image part" if type_of(part) == "image_url" else "text part"),
    ],
)
AssistantPart = TypeAliasType(
    "AssistantPart",
    Annotated[
        Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")],
        Discriminator(lambda part: "refusal part" if type_of(part) == "refusal" else "text part"),
    ],
)
Content = TypeAliasType("Content", TextOrList[str, Annotated[LongList[Part], Field(min_length=1)]])
AssistantContent = TypeAliasType(
    "AssistantContent", TextOrList[str, Annotated[LongList[AssistantPart], Field(min_length=1)]]
)


def text_of(content: str | Sequence[TextPart | ImagePart | RefusalPart]) -> str:
    """The content as one text: parts are lines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


Name = Annotated[str, Field(min_length=1, max_length=256)]


class MessageBody(OpenBody):
    """A message. Chat templates read its unknown fields too."""

    reads_extras: ClassVar[bool] = True

    @property
    def text(self) -> str | None:
        """The content as one text."""
        content = getattr(self, "content", None)
        return None if content is None else text_of(content)

    def without_effect(self) -> list[str]:
        """Images."""
        content = getattr(self, "content", None)
        parts = content if isinstance(content, list) else ()
        return [f"content.{index}" for index, part in enumerate(parts) if isinstance(part, ImagePart)]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it, but that the arguments of its calls are still text.

        Templates test for the optional keys, so those without a value are left out.
        """
        extras = {name: value for name, value in (self.model_extra or {}).items() if asks_for("messages", name, value)}
        known = {name: getattr(self, name) for name in type(self).model_fields if name != "refusal"}
        known["role"] = "system" if known["role"] == "developer" else known["role"]
        known["content"] = self.text
        if calls := known.get("tool_calls"):
            known["tool_calls"] = [call.for_template() for call in calls]
        return extras | {name: value for name, value in known.items() if value is not None and value != []}


class SystemMessage(MessageBody):
    """Instructions. `developer` is OpenAI's newer word for `system`; chat templates know only the older one."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(MessageBody):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class FunctionCall(OpenBody):
    """A function with its arguments: any text, since a model may have run out of tokens in the middle of them."""

    name: str
    arguments: str


class ToolCall(OpenBody):
    """A call that the assistant made earlier in the chat."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it, but that its arguments are still text."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


class AssistantMessage(MessageBody):
    """What the model said earlier. A `refusal` is a part of the content."""

    role: Literal["assistant"]
    refusal: str | None = None
    tool_calls: LongList[ToolCall] | None = None
    content: AssistantContent | None = Field(None, validate_default=True)
    name: Name | None = None

    @field_validator("content")
    @classmethod
    def _is_said(cls, content: AssistantContent | None, info: ValidationInfo) -> AssistantContent | None:
        others = info.data  # without those that are wrong themselves
        if content is None and others.get("refusal", "") is None and not others.get("tool_calls", True):
            raise ValueError("a string or a list of at least 1 part, unless tool_calls or refusal is there; got null")
        return content

    @property
    def text(self) -> str:
        """The content and the refusal as one text."""
        said = [] if self.content is None else [text_of(self.content)]
        return "\n".join(said if self.refusal is None else [*said, self.refusal])


class ToolMessage(MessageBody):
    """What a tool answered to the call of that id."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


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


def _form_of(message: object) -> str | None:
    role = type_of(message, "role")
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

    form_field: ClassVar[str] = "response_format"

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
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: ReasoningEffort = None
    thinking_budget: ThinkingBudget = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, top_logprobs: int, info: ValidationInfo) -> int:
        if top_logprobs and info.data.get("logprobs") is False:
            raise ValueError("only allowed with logprobs")
        return top_logprobs

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_the_only_limit(cls, max_completion_tokens: int, info: ValidationInfo) -> int:
        if info.data.get("max_tokens") not in (None, max_completion_tokens):
            raise ValueError("is the same field as max_tokens; give only one of them, or the same number")
        return max_completion_tokens

    def without_effect(self) -> list[str]:
        """The form beside calls that must be made, and `parallel_tool_calls` without tools."""
        return super().without_effect() + parallel_without_effect(self.tools, parallel=self.parallel_tool_calls)

    def schema_places(self) -> dict[str, str]:
        """Those of `tools`."""
        return {tool.function.name: f"tools.{index}.function.parameters" for index, tool in enumerate(self.tools)}

    def wish(self) -> Wish:
        """What the call says of thinking."""
        return Wish(self.chat_template_kwargs or {}, self.reasoning_effort, budget=self.thinking_budget)

    def own_form(self) -> Grammar | None:
        """What `response_format` says."""
        return None if self.response_format is None else self.response_format.to_grammar()

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return tool_use(
            [tool.function.to_tool() for tool in self.tools], self.tool_choice, parallel=self.parallel_tool_calls
        )

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


MAX_CHECKED = 8
"""Roles, and fields, of a chat that are tried one by one: each costs a rendering of the chat."""
ALWAYS_TAKEN = {
    "assistant": frozenset({"role", "content", "tool_calls"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
}
STAND_INS = ("user", "assistant", "system")

Render = Callable[[Chat], str]


def chat_prompt(
    messages: Iterable[dict[str, Any]],
    tokens: Tokens,
    support: ToolSupport,
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    limit: TextLimit | CharacterLimit | None = None,
) -> ChatPrompt:
    """The `messages`, as chat templates read them, in the model's own template with its `tools`; the other arguments
    and errors of `Tokens.chat_text` and `Tokens.encode`.

    Raises `FieldOutOfRange` for messages of a role that make no difference to the text.
    """
    render = partial(
        support.chat_text,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
    )
    chat = list(messages)
    try:
        text = render(chat)
    except MalformedRequest as error:
        raise _refusal(chat, render, error) from error
    _check_roles(chat, text, render)
    left_out = _left_out(chat, text, render)
    paths = (
        f"messages.{index}.{name}"
        for index, message in enumerate(chat)
        for name in message
        if (message["role"], name) in left_out
    )

    def encode(chat: Chat) -> list[int]:
        return tokens.encode(render(chat), add_special_tokens=False, limit=limit)

    token_ids = tokens.encode(text, add_special_tokens=False, limit=limit)
    ends = support.prefix_ends(text, token_ids, lambda: render(mark_instructions(chat)))
    return ChatPrompt(chat, tools, encode, token_ids, support.opening(text), paths, ends)


def _text(chat: Chat, render: Render) -> str | None:
    """The text of a changed chat; None: the template does not take it."""
    try:
        return render(chat)
    except MalformedRequest:
        return None


def _custom_roles(chat: Chat) -> dict[str, int]:
    """Roles beside OpenAI's, each with the index of its first message. Raises `FieldOutOfRange` for too many."""
    roles: dict[str, int] = {}
    for index, message in enumerate(chat):
        if message["role"] not in ROLE_TAGS:
            roles.setdefault(message["role"], index)
    if len(roles) > MAX_CHECKED:
        raise FieldOutOfRange.at("messages", f"at most {MAX_CHECKED} roles besides {', '.join(ROLE_TAGS)}")
    return roles


def _refusal(chat: Chat, render: Render, error: MalformedRequest) -> MalformedRequest:
    """The template's refusal, which names a role if the chat would be taken with another role in its place."""
    roles = _custom_roles(chat)
    for refused in [{role} for role in roles] + [set(roles)] * (len(roles) > 1):
        for stand_in in STAND_INS:
            changed = [{**each, "role": stand_in} if each["role"] in refused else each for each in chat]
            if _text(changed, render) is not None:
                name = f"messages.{min(roles[role] for role in refused)}.role"
                return MalformedRequest.at(name, error.message)
    return error


def _check_roles(chat: Chat, text: str, render: Render) -> None:
    """Raise `FieldOutOfRange` for a role whose messages the template leaves out."""
    for role, first in _custom_roles(chat).items():
        changed = [
            {**each, "content": f"{each['content']}x"} if each["role"] == role and "content" in each else each
            for each in chat
        ]
        if "content" in chat[first] and _text(changed, render) == text:
            name = f"messages.{first}.role"
            raise FieldOutOfRange.at(name, "this model's chat template leaves out messages of this role")


def _left_out(chat: Chat, text: str, render: Render) -> set[tuple[str, str]]:
    """The fields, each with the role of its messages, that the template leaves out.

    Raises `FieldOutOfRange` for too many of them if they are not all left out.
    """
    fields = {
        (each["role"], name)
        for each in chat
        for name in each.keys() - ALWAYS_TAKEN.get(each["role"], {"role", "content"})
    }
    if not fields or _text(_without(chat, fields), render) == text:
        return fields
    if len(fields) > MAX_CHECKED:
        raise FieldOutOfRange.at("messages", f"at most {MAX_CHECKED} fields besides role and content")
    return {field for field in fields if _text(_without(chat, {field}), render) == text}


def _without(chat: Chat, fields: set[tuple[str, str]]) -> Chat:
    return [{name: value for name, value in each.items() if (each["role"], name) not in fields} for each in chat]
