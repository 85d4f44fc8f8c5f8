"""What a call of `/v1/responses` brings."""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.openai.fields import (
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    TemplateVariables,
    ThinkingBudget,
    parallel_without_effect,
)
from app.openai.response_items import (
    FORM_OF,
    MAX_ID,
    AnyItem,
    ApplyPatchCallItem,
    ApplyPatchCallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Id,
    InputMessageItem,
    InputTextPart,
    ItemStatus,
    LocalShellCallItem,
    OutputKind,
    OutputMessageItem,
    OutputTextPart,
    ReasoningItem,
    RefusedPart,
    ShellCallItem,
    ShellCallOutputItem,
    ThoughtPart,
    new_id,
)
from app.openai.response_tools import (
    HostedTool,
    OfferedTool,
    ResponseTool,
    ResponseToolChoice,
    check_grammars,
    offered_tools,
    response_tool_use,
    schema_places,
)
from app.tools.definitions import ToolUse
from app.tools.support import ToolSupport
from app.tools.thinking import Seal, Wish
from app.wire.base import MAX_COUNT, LongList, TextOrList, type_of
from app.wire.calls import IMAGE_LEFT_OUT, RESPONSES, CallBody, OpenBody, bare
from app.wire.sessions import Metadata
from app.wire.turns import json_form

MAX_PARTS = 10_000


class TextBody(OpenBody):
    """Text. `output_text` is what the model said earlier."""

    type: Literal["input_text", "output_text"]
    text: str


class RefusalBody(OpenBody):
    """Text in which a model said earlier that it would not answer."""

    type: Literal["refusal"]
    refusal: str


class ImageBody(OpenBody):
    """An image, which no model here sees: a text stands in its place."""

    reads_extras: ClassVar[bool] = True

    type: Literal["input_image"]


def _part_form(part: object) -> str | None:
    kinds = {"input_text": "text", "output_text": "text", "refusal": "refusal", "input_image": "image"}
    return kinds.get(type_of(part) or "")


PartBody = TypeAliasType(
    "PartBody",
    Annotated[
        Annotated[TextBody, Tag("text")] | Annotated[RefusalBody, Tag("refusal")] | Annotated[ImageBody, Tag("image")],
        Discriminator(
            _part_form,
            custom_error_type="item",
            custom_error_message="a part of type input_text, output_text, refusal or input_image: the models read text",
        ),
    ],
)
ItemContent = TypeAliasType(
    "ItemContent", TextOrList[str, Annotated[LongList[PartBody], Field(min_length=1, max_length=MAX_PARTS)]]
)


def _text_of(part: TextBody | RefusalBody | ImageBody) -> str:
    if isinstance(part, ImageBody):
        return IMAGE_LEFT_OUT
    return part.refusal if isinstance(part, RefusalBody) else part.text


def _images(content: str | list[TextBody | RefusalBody | ImageBody], field: str) -> list[str]:
    """The paths of the images in an item's `field`."""
    if isinstance(content, str):  # it may have millions of characters
        return []
    return [f"{field}.{index}" for index, part in enumerate(content) if isinstance(part, ImageBody)]


class MessageBody(OpenBody):
    """A message. One of the `assistant` is what the model said earlier."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: Id | None = None
    status: ItemStatus | None = None
    phase: str | None = Field(None, max_length=64, description="of OpenAI's own models: has no effect")

    def without_effect(self) -> list[str]:
        """`phase`, if there is one, and images."""
        return [*([] if self.phase is None else ["phase"]), *_images(self.content, "content")]

    def to_item(self) -> AnyItem:
        """The item."""
        id = self.id or new_id("msg")
        parts = [TextBody(type="input_text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "assistant":
            said = [
                RefusedPart(refusal=part.refusal)
                if isinstance(part, RefusalBody)
                else OutputTextPart(text=_text_of(part))
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
    namespace: Id | None = None
    arguments: str
    id: Id | None = None
    status: ItemStatus | None = None

    def to_item(self) -> FunctionCallItem:
        """The item."""
        return FunctionCallItem(
            id=self.id or new_id("fc"),
            call_id=self.call_id,
            name=self.name,
            namespace=self.namespace,
            arguments=self.arguments,
        )


class FunctionCallOutputBody(OpenBody):
    """What the client's function returned, or its custom tool, or its program. The last may have its call's id as its
    own.
    """

    type: OutputKind
    call_id: Id
    output: ItemContent
    id: Id | None = None
    status: ItemStatus | None = None

    @model_validator(mode="before")
    @classmethod
    def _call_by_id(cls, body: Any) -> Any:
        by_id = isinstance(body, dict) and type_of(body) == "local_shell_call_output" and body.get("call_id") is None
        return {**body, "call_id": body["id"]} if by_id and "id" in body else body

    def without_effect(self) -> list[str]:
        """Images."""
        return _images(self.output, "output")

    def to_item(self) -> FunctionCallOutputItem:
        """The item."""
        output = self.output
        parts = output if isinstance(output, str) else [InputTextPart(text=_text_of(part)) for part in output]
        return FunctionCallOutputItem(id=self.id or new_id("fco"), type=self.type, call_id=self.call_id, output=parts)


class ReasoningBody(OpenBody):
    """What a model thought earlier. It has no effect if the model's chat template leaves thoughts out."""

    reads_extras: ClassVar[bool] = True

    type: Literal["reasoning"]

    def to_item(self, seal: Seal) -> ReasoningItem | None:
        """The item; None: it holds no thoughts that this server can read."""
        extras = self.model_extra or {}
        sealed, shown = extras.get("encrypted_content"), (extras.get("content"), extras.get("summary"))
        text = seal.open(sealed) or next(filter(None, map(_texts_of, shown)), "")
        given = extras.get("id")
        id = given if isinstance(given, str) and given.isascii() and 0 < len(given) <= MAX_ID else new_id("rs")
        return ReasoningItem(id=id, content=[ThoughtPart(text=text)]) if text else None


def _texts_of(parts: object) -> str:
    found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    said = "\n".join(text for text in found if isinstance(text, str))
    return said.encode(errors="replace").decode()  # UTF-8 has no lone surrogates


SUMMARY = "A summary of the conversation so far:\n"
"""What the model reads before one."""


class ForeignBody(OpenBody):
    """What another server's tools have done, or a summary that only its own server can read: else it has no effect."""

    reads_extras: ClassVar[bool] = True

    type: str

    def to_item(self, seal: Seal) -> InputMessageItem | None:
        """The summary of a conversation; None: it is none of this server's."""
        sealed = (self.model_extra or {}).get("encrypted_content")
        text = seal.open(sealed) if self.type == "compaction" and isinstance(sealed, str) else None
        if text is None:
            return None
        return InputMessageItem(id=new_id("cmp"), role="user", content=[InputTextPart(text=SUMMARY + text)])


def _is_of_others(item: object) -> bool:
    return isinstance(item, ForeignBody) and item.type != "compaction"


class ItemReferenceBody(OpenBody):
    """An item that the server has kept."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


FORMS = (
    *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
    *("custom_tool_call", "custom_tool_call_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output", "compaction"),
)
FOREIGN = (
    *("compaction", "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call"),
    *("image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
    *("program", "program_output", "tool_search_call", "tool_search_output", "web_search_call"),
)


def _form_of(item: object) -> str | None:
    kind = type_of(item)
    if isinstance(item, dict) and not item.get("type"):
        return "item_reference" if item.keys() == {"id"} else "message"
    if kind in FOREIGN:
        return "foreign"
    return FORM_OF.get(kind, kind) if kind in FORMS else None


InputItemBody = TypeAliasType(
    "InputItemBody",
    Annotated[
        Annotated[MessageBody, Tag("message")]
        | Annotated[FunctionCallBody, Tag("function_call")]
        | Annotated[FunctionCallOutputBody, Tag("function_call_output")]
        | Annotated[ReasoningBody, Tag("reasoning")]
        | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
        | Annotated[LocalShellCallItem, Tag("local_shell_call")]
        | Annotated[ShellCallItem, Tag("shell_call")]
        | Annotated[ShellCallOutputItem, Tag("shell_call_output")]
        | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
        | Annotated[ApplyPatchCallOutputItem, Tag("apply_patch_call_output")]
        | Annotated[ForeignBody, Tag("foreign")]
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
    """Any JSON object, or one that matches a schema."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="what other servers take here")


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


MAX_ITEMS = 100_000
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

Input = TextOrList[str, Annotated[LongList[InputItemBody], Field(min_length=1, max_length=MAX_ITEMS)]]


ENCRYPTED = "reasoning.encrypted_content"
"""The entry that asks for sealed thoughts."""


class ReasoningConfig(OpenBody):
    """How much the model thinks, and how that is told."""

    effort: str | None = Field(
        None, max_length=32, description="as the model's chat template takes it; none: not at all"
    )
    summary: str | None = Field(
        None, max_length=32, description="any value: the thoughts are the summary, and the item has no content"
    )
    generate_summary: str | None = Field(None, max_length=32, description="the older name of summary")


class ResponseStreamOptions(OpenBody):
    """Options of a streamed response: none has an effect."""


class ConversationBody(OpenBody):
    """The conversation to go on with."""

    id: Id


_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID}
ConversationOrId = Annotated[
    ConversationBody,
    BeforeValidator(lambda given: {"id": given} if isinstance(given, str) else given),
    WithJsonSchema({"anyOf": [_ID, {"type": "object", "properties": {"id": _ID}, "required": ["id"]}]}),
]


class ResponseBody(CallBody):
    """A response to generate. `input` is what is new since the response `previous_response_id`."""

    place: ClassVar[str] = RESPONSES
    prompt_field: ClassVar[str] = "input"
    form_field: ClassVar[str] = "text.format"

    model: str = Field(description="the served model's name, as /v1/models gives it")
    input: Input = Field(description="a text of the user, or items")
    instructions: str | None = Field(None, description="the system's message in front; of this response only")
    previous_response_id: str | None = Field(None, min_length=1, max_length=256, description="goes on after it")
    conversation: ConversationOrId | None = Field(
        None, description="goes on there: its id, or an object with it. Input and output become items of it"
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="most tokens to generate (default: what the context has room for)"
    )
    tools: Annotated[list[ResponseTool], AfterValidator(check_grammars)] = Field(
        default=[], max_length=MAX_TOOLS, description="what the model may call"
    )
    tool_choice: ResponseToolChoice | None = Field(
        None, description="what is called (default: auto with tools, else none)"
    )
    parallel_tool_calls: bool = Field(True, description="a response may hold several calls")
    text: TextConfig | None = Field(None, description="how the text is written")
    reasoning: ReasoningConfig | None = Field(None, description="how the model thinks")
    chat_template_kwargs: TemplateVariables = None
    thinking_budget: ThinkingBudget = None
    store: bool = Field(True, description="keep the response, to be read and continued")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(None, description="the caller's own labels, which the response returns")
    truncation: Literal["disabled", "auto"] = Field("disabled", description="the server never shortens a conversation")
    generate: bool = Field(True, description="false: compute the prompt, and answer without output")
    background: bool = Field(False, description="answer at once, and generate the response without a client")
    include: list[Annotated[str, Field(max_length=256)]] = Field(
        default=[],
        max_length=64,
        description=f"{LOGPROBS} or top_logprobs asks for log-probabilities, {ENCRYPTED} for sealed thoughts",
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token")
    user: str | None = Field(
        None, max_length=512, description="the caller's name for its end user: metadata of a session that opens"
    )

    @field_validator("background")
    @classmethod
    def _is_kept(cls, background: bool, info: ValidationInfo) -> bool:
        if background and info.data.get("store") is False:
            raise ValueError("needs store, or nobody could read the response")
        return background

    @field_validator("max_tokens")
    @classmethod
    def _has_another_name(cls, max_tokens: int) -> int:
        raise ValueError("is max_output_tokens here")

    def without_effect(self) -> list[str]:
        """Items and tools of other servers, a form beside calls that must be made, and more that changes nothing."""
        items = () if isinstance(self.input, str) else self.input
        unread = [f"input.{index}" for index, item in enumerate(items) if _is_of_others(item)]
        unread += [f"tools.{index}" for index, tool in enumerate(self.tools) if isinstance(tool, HostedTool)]
        unread += super().without_effect()
        unread += parallel_without_effect(self.tools, parallel=self.parallel_tool_calls)
        unread += ["truncation"] if self.truncation == "auto" else []
        known = (LOGPROBS, ENCRYPTED)
        return unread + [f"include.{index}" for index, name in enumerate(self.include) if name not in known]

    def without_thoughts(self, support: ToolSupport, seal: Seal) -> Iterator[str]:
        """The fields about thoughts that change nothing for this model, and summaries that the seal does not open."""
        items = () if isinstance(self.input, str) else self.input
        for index, item in enumerate(items):
            if isinstance(item, ForeignBody) and not _is_of_others(item) and item.to_item(seal) is None:
                yield f"input.{index}"
        if not support.reads_thoughts:
            yield from (f"input.{index}" for index, item in enumerate(items) if isinstance(item, ReasoningBody))
        if support.thinking is None:
            given = ReasoningConfig() if self.reasoning is None else self.reasoning
            asked = given.effort in (None, "none") and (given.model_fields_set or given.model_extra)
            yield from ["reasoning"] if asked else []
            yield from (f"include.{index}" for index, name in enumerate(self.include) if name == ENCRYPTED)

    @property
    def asks_for_summary(self) -> bool:
        """Whether thoughts are told as a summary."""
        given = self.reasoning
        return given is not None and (given.summary is not None or given.generate_summary is not None)

    def wish(self) -> Wish:
        """What the call says of thinking."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return Wish(self.chat_template_kwargs or {}, effort, "reasoning", budget=self.thinking_budget)

    def items(self, find: Callable[[str], AnyItem], seal: Seal) -> list[AnyItem]:
        """The items of `input`. `find` gives a kept item by its id, and raises `NotFound`; `seal` opens thoughts."""
        if isinstance(self.input, str):
            text = InputTextPart(text=self.input)
            return [InputMessageItem(id=new_id("msg"), role="user", content=[text])]
        items: list[AnyItem] = []
        for body in self.input:
            match body:
                case ItemReferenceBody():
                    items.append(find(body.id))
                case ReasoningBody() | ForeignBody():
                    opened = body.to_item(seal)
                    items += [] if opened is None else [opened]
                case MessageBody() | FunctionCallBody() | FunctionCallOutputBody():
                    items.append(body.to_item())
                case item:
                    items.append(bare(item))
        return items

    def own_form(self) -> Grammar | None:
        """What `text.format` says."""
        match self.text_format:
            case TextFormat():
                return None
            case JsonObjectFormat(json_schema=None):
                return json_form(None, "text.format")
            case JsonObjectFormat() as form:
                return json_form(form.json_schema, "text.format.schema")
            case FlatJsonSchemaFormat() as form:
                return json_form(form.json_schema, "text.format.schema")

    @property
    def text_format(self) -> FlatFormat:
        """The form that the text must have."""
        asked = None if self.text is None else self.text.format
        return asked or TextFormat(type="text")

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return response_tool_use(self.tools, self.offered, self.tool_choice, parallel=self.parallel_tool_calls)

    def schema_places(self) -> dict[str, str]:
        """Those of `tools`."""
        return schema_places(self.tools)

    @cached_property
    def offered(self) -> list[OfferedTool]:
        """The tools as the model sees them. Raises `FieldOutOfRange`."""
        return offered_tools(self.tools)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_output_tokens if self.generate else 0

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


class CompactBody(ResponseBody):
    """A conversation to shorten."""

    input: Input = Field(default="", description="a text of the user, or items; what is new since the last response")
    stream: Literal[False] = Field(False, description="only false")
    background: Literal[False] = Field(False, description="only false")


class CountBody(ResponseBody):
    """What a response would read. Fields of its answer are checked, and change no count."""

    model: str = Field("", description="the served model's name (default: the base)")
    input: Input = Field(default="", description="a text of the user, or items; what is new since the last response")

    def items(self, find: Callable[[str], AnyItem], seal: Seal) -> list[AnyItem]:
        """As of a response, which needs some. Raises `FieldOutOfRange` if there is nothing to count."""
        if self.input != "":
            return super().items(find, seal)
        if self.previous_response_id is None and self.conversation is None and self.instructions is None:
            raise FieldOutOfRange.at("input", "there is nothing to count")
        return []
