"""What a call of `/v1/responses` brings."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.openai.fields import (
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    FlatToolChoice,
    FunctionDefinition,
    parallel_without_effect,
    tool_use,
)
from app.openai.response_items import (
    AnyItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputMessageItem,
    InputTextPart,
    ItemStatus,
    OutputMessageItem,
    OutputTextPart,
    RefusedPart,
    new_id,
)
from app.tools.definitions import ToolUse
from app.wire.base import MAX_COUNT, LongList, TextOrList, type_of
from app.wire.calls import CallBody
from app.wire.extras import RESPONSES, OpenBody
from app.wire.sessions import Metadata
from app.wire.turns import json_form

Id = Annotated[str, Field(min_length=1, max_length=256)]
MAX_PARTS = 10_000


class TextBody(OpenBody):
    """Text. `output_text` is what the model said earlier."""

    type: Literal["input_text", "output_text"]
    text: str


class RefusalBody(OpenBody):
    """Text in which a model said earlier that it would not answer."""

    type: Literal["refusal"]
    refusal: str


def _part_form(part: object) -> str | None:
    return {"input_text": "text", "output_text": "text", "refusal": "refusal"}.get(type_of(part) or "")


PartBody = TypeAliasType(
    "PartBody",
    Annotated[
        Annotated[TextBody, Tag("text")] | Annotated[RefusalBody, Tag("refusal")],
        Discriminator(
            _part_form,
            custom_error_type="item",
            custom_error_message="a part of type input_text, output_text or refusal: the models here read text",
        ),
    ],
)
ItemContent = TypeAliasType(
    "ItemContent", TextOrList[str, Annotated[LongList[PartBody], Field(min_length=1, max_length=MAX_PARTS)]]
)


def _text_of(part: TextBody | RefusalBody) -> str:
    return part.refusal if isinstance(part, RefusalBody) else part.text


class MessageBody(OpenBody):
    """A message. One of the `assistant` is what the model said earlier."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: Id | None = None
    status: ItemStatus | None = None
    phase: str | None = Field(None, max_length=64, description="of OpenAI's own models: has no effect")

    def without_effect(self) -> list[str]:
        """`phase`, if there is one."""
        return [] if self.phase is None else ["phase"]

    def to_item(self) -> AnyItem:
        """The item."""
        id = self.id or new_id("msg")
        parts = [TextBody(type="input_text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "assistant":
            said = [
                RefusedPart(refusal=part.refusal) if isinstance(part, RefusalBody) else OutputTextPart(text=part.text)
                for part in parts
            ]
            return OutputMessageItem(id=id, content=said)
        sent = [InputTextPart(text=_text_of(part)) for part in parts]
        return InputMessageItem(id=id, role=self.role, content=sent)


class FunctionCallBody(OpenBody):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: str
    id: Id | None = None
    status: ItemStatus | None = None

    def to_item(self) -> FunctionCallItem:
        """The item."""
        return FunctionCallItem(
            id=self.id or new_id("fc"), call_id=self.call_id, name=self.name, arguments=self.arguments
        )


class FunctionCallOutputBody(OpenBody):
    """What the client's function returned."""

    type: Literal["function_call_output"]
    call_id: Id
    output: ItemContent
    id: Id | None = None
    status: ItemStatus | None = None

    def to_item(self) -> FunctionCallOutputItem:
        """The item."""
        output = self.output
        parts = output if isinstance(output, str) else [InputTextPart(text=_text_of(part)) for part in output]
        return FunctionCallOutputItem(id=self.id or new_id("fco"), call_id=self.call_id, output=parts)


class ReasoningBody(OpenBody):
    """Reasoning of a model. No model here writes or reads it, so the item has no effect."""

    reads_extras: ClassVar[bool] = True

    type: Literal["reasoning"]


class ItemReferenceBody(OpenBody):
    """An item that the server has kept."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


FORMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _form_of(item: object) -> str | None:
    kind = type_of(item)
    if isinstance(item, dict) and not item.get("type"):
        kind = "item_reference" if item.keys() == {"id"} else "message"
    return kind if kind in FORMS else None


InputItemBody = TypeAliasType(
    "InputItemBody",
    Annotated[
        Annotated[MessageBody, Tag("message")]
        | Annotated[FunctionCallBody, Tag("function_call")]
        | Annotated[FunctionCallOutputBody, Tag("function_call_output")]
        | Annotated[ReasoningBody, Tag("reasoning")]
        | Annotated[ItemReferenceBody, Tag("item_reference")],
        Discriminator(
            _form_of, custom_error_type="item", custom_error_message=f"an item whose type is one of {', '.join(FORMS)}"
        ),
    ],
)


class TextFormat(OpenBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(OpenBody):
    """Any JSON object."""

    type: Literal["json_object"]


class FlatJsonSchemaFormat(OpenBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, description="for the caller: the model does not see it")
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(False, description="changes nothing: the answer always matches the schema")


FlatFormat = Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat, Field(discriminator="type")]


class TextConfig(OpenBody):
    """How the text is written."""

    format: FlatFormat | None = Field(None, description="the form that the text must have (default: any text)")


class FlatFunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


MAX_ITEMS = 100_000
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

Input = TextOrList[str, Annotated[LongList[InputItemBody], Field(min_length=1, max_length=MAX_ITEMS)]]


class ResponseStreamOptions(OpenBody):
    """Options of a streamed response: none has an effect."""


class ResponseBody(CallBody):
    """A response to generate. `input` is what is new since the response `previous_response_id`."""

    place: ClassVar[str] = RESPONSES
    prompt_field: ClassVar[str] = "input"
    form_field: ClassVar[str] = "text.format"

    model: str = Field(description="the served model's name, as /v1/models gives it")
    input: Input = Field(description="a text of the user, or items")
    instructions: str | None = Field(None, description="the system's message in front; of this response only")
    previous_response_id: str | None = Field(None, min_length=1, max_length=256, description="goes on after it")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="most tokens to generate (default: what the context has room for)"
    )
    tools: list[FlatFunctionTool] = Field(default=[], max_length=MAX_TOOLS, description="functions to call")
    tool_choice: FlatToolChoice | None = Field(None, description="what is called (default: auto with tools, else none)")
    parallel_tool_calls: bool = Field(True, description="a response may hold several calls")
    text: TextConfig | None = Field(None, description="how the text is written")
    store: bool = Field(True, description="keep the response, to be read and continued")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(None, description="the caller's own labels, which the response returns")
    truncation: Literal["disabled"] = Field("disabled", description="the server never shortens a conversation")
    background: Literal[False] = Field(False, description="no response runs without a client")
    include: list[Annotated[str, Field(max_length=256)]] = Field(
        default=[], max_length=64, description=f"{LOGPROBS} or top_logprobs asks for log-probabilities"
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token")
    user: str | None = Field(
        None, max_length=512, description="the caller's name for its end user: metadata of a session that opens"
    )

    @field_validator("max_tokens")
    @classmethod
    def _has_another_name(cls, max_tokens: int) -> int:
        raise ValueError("is max_output_tokens here")

    @field_validator("tools", mode="before")
    @classmethod
    def _functions_only(cls, tools: Any) -> Any:
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else "function"
            if kind not in ("function", None):
                name = f"tools.{index}.type"
                raise FieldOutOfRange(f"{name}: only functions of the client, not {str(kind)[:64]!r}", param=name)
        return tools

    def without_effect(self) -> list[str]:
        """Reasoning, a form beside calls that must be made, and more fields that ask for nothing here."""
        items = () if isinstance(self.input, str) else self.input
        unread = [f"input.{index}" for index, item in enumerate(items) if isinstance(item, ReasoningBody)]
        unread += super().without_effect()
        unread += parallel_without_effect(self.tools, parallel=self.parallel_tool_calls)
        return unread + [f"include.{index}" for index, name in enumerate(self.include) if name != LOGPROBS]

    def items(self, find: Callable[[str], AnyItem]) -> list[AnyItem]:
        """The items of `input`. `find` gives a kept item by its id, and raises `NotFound`."""
        if isinstance(self.input, str):
            text = InputTextPart(text=self.input)
            return [InputMessageItem(id=new_id("msg"), role="user", content=[text])]
        bodies = [body for body in self.input if not isinstance(body, ReasoningBody)]
        return [find(body.id) if isinstance(body, ItemReferenceBody) else body.to_item() for body in bodies]

    def own_form(self) -> Grammar | None:
        """What `text.format` says."""
        match self.text_format:
            case TextFormat():
                return None
            case JsonObjectFormat():
                return json_form(None, "text.format")
            case FlatJsonSchemaFormat() as form:
                return json_form(form.json_schema, "text.format.schema")

    @property
    def text_format(self) -> FlatFormat:
        """The form that the text must have."""
        asked = None if self.text is None else self.text.format
        return asked or TextFormat(type="text")

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        tools = [tool.to_tool() for tool in self.tools]
        return tool_use(tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_output_tokens

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` came in."""
        return "max_output_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None to report nothing."""
        if self.top_logprobs is None:
            return 0 if LOGPROBS in self.include else None
        return self.top_logprobs
