"""The items of a response, as its input and its output have them."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeAliasType

from app.wire.base import MAX_COUNT, LongList, is_none, scored_shape, shape, type_of
from app.wire.calls import OpenBody


def encoded(value: Any) -> bytes:
    """The JSON of a value, or of `bytes` that are JSON: a tenth of its size as objects. Its integers may have more than
    64 bits, as in a client's JSON schema.
    """
    if isinstance(value, bytes):
        return value
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value).encode()


class JsonOf:
    """Annotates `bytes` that are JSON already, which `to_json` copies into that of the model around them. `form` is the
    type of the value, which the API's document shows.
    """

    def __init__(self, form: Any) -> None:
        self._form = form

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        """Takes what is encoded as it is, and encodes what the journal has."""
        copied = core_schema.plain_serializer_function_ser_schema(orjson.Fragment)
        return core_schema.no_info_plain_validator_function(encoded, serialization=copied)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """That of the value."""
        return handler(TypeAdapter(self._form).core_schema)


def to_json(model: BaseModel) -> bytes:
    """The JSON of a model that may have encoded parts."""
    return orjson.dumps(model.model_dump())


ItemStatus = Literal["in_progress", "completed", "incomplete"]
MAX_ID = 256
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class InputTextPart(BaseModel):
    """Text that a client has sent."""

    type: Literal["input_text"] = "input_text"
    text: str


_TOKEN = {"token": str, "logprob": float, "bytes": [int]}
TopLogprob = shape("TopLogprob", "A token that could stand at a position.", _TOKEN)
TextLogprob = scored_shape("TextLogprob", TopLogprob, _TOKEN)


class OutputTextPart(BaseModel):
    """Text of the model. It has no annotations here."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[list[str], Field(max_length=0)] = []
    logprobs: Annotated[bytes, JsonOf(list[TextLogprob])] = Field(default_factory=lambda: b"[]")


class RefusedPart(BaseModel):
    """Text in which a model said that it would not answer."""

    type: Literal["refusal"] = "refusal"
    refusal: str

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


OutputPart = TypeAliasType("OutputPart", Annotated[OutputTextPart | RefusedPart, Field(discriminator="type")])


class InputMessageItem(BaseModel):
    """A message to the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer"]
    content: LongList[InputTextPart]
    status: ItemStatus = "completed"


class OutputMessageItem(BaseModel):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: LongList[OutputPart]
    status: ItemStatus = "completed"


class FunctionCallItem(BaseModel):
    """A call of a function. Its result comes with the same `call_id`."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    namespace: str | None = Field(None, exclude_if=is_none)
    arguments: str
    status: ItemStatus = "completed"


OutputKind = Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]


class FunctionCallOutputItem(BaseModel):
    """The result of a call."""

    id: str
    type: OutputKind = "function_call_output"
    call_id: str
    output: str | LongList[InputTextPart]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.output if isinstance(self.output, str) else "\n".join(part.text for part in self.output)


MAX_COMMANDS = 10_000
Words = Annotated[LongList[str], Field(max_length=MAX_COMMANDS)]
Milliseconds = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a tool as the model reads and writes it."""
    return name if namespace is None else f"{namespace}__{name}"


class CustomToolCallItem(OpenBody):
    """A call of a custom tool, whose input is free text."""

    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: Id = Field(default_factory=lambda: new_id("ctc"))
    call_id: Id
    name: Id
    namespace: Id | None = Field(None, exclude_if=is_none)
    input: str
    status: ItemStatus = "completed"


class LocalShellAction(OpenBody):
    """A program with its arguments."""

    type: Literal["exec"] = "exec"
    command: Words
    env: dict[str, str] = Field(default_factory=dict)
    timeout_ms: Milliseconds | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(OpenBody):
    """A call of `local_shell`."""

    type: Literal["local_shell_call"] = "local_shell_call"
    id: Id = Field(default_factory=lambda: new_id("lsh"))
    call_id: Id
    action: LocalShellAction
    status: ItemStatus = "completed"


class ShellAction(OpenBody):
    """Commands of a shell."""

    commands: Words
    timeout_ms: Milliseconds | None = None
    max_output_length: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None


class ShellCallItem(OpenBody):
    """A call of `shell`."""

    type: Literal["shell_call"] = "shell_call"
    id: Id = Field(default_factory=lambda: new_id("sh"))
    call_id: Id
    action: ShellAction
    status: ItemStatus = "completed"


class PatchOperation(OpenBody):
    """What becomes of a file. Only a deleted one needs no `diff`."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = Field(None, exclude_if=is_none)

    @model_validator(mode="after")
    def _has_a_diff(self) -> Self:
        if self.diff is None and self.type != "delete_file":
            raise ValueError(f"diff is required with type {self.type}")
        return self


class ApplyPatchCallItem(OpenBody):
    """A call of `apply_patch`."""

    type: Literal["apply_patch_call"] = "apply_patch_call"
    id: Id = Field(default_factory=lambda: new_id("apc"))
    call_id: Id
    operation: PatchOperation
    status: Literal["in_progress", "completed"] = "completed"


class ShellOutcome(OpenBody):
    """How a command ended."""

    type: Literal["exit", "timeout"]
    exit_code: int | None = Field(None, exclude_if=is_none)


class ShellOutput(OpenBody):
    """What a command has written, and how it ended."""

    stdout: str = ""
    stderr: str = ""
    outcome: ShellOutcome | None = Field(None, exclude_if=is_none)

    @property
    def text(self) -> str:
        """What the model reads."""
        outcome = self.outcome
        end = "" if outcome is None else "timeout" if outcome.type == "timeout" else f"exit code {outcome.exit_code}"
        return "\n".join(each for each in (self.stdout, self.stderr, end) if each)


class ShellCallOutputItem(OpenBody):
    """What the commands of a `shell_call` have written."""

    type: Literal["shell_call_output"] = "shell_call_output"
    id: Id = Field(default_factory=lambda: new_id("sho"))
    call_id: Id
    output: Annotated[LongList[ShellOutput], Field(max_length=MAX_COMMANDS)]
    max_output_length: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """What the model reads."""
        return "\n".join(each.text for each in self.output)


class ApplyPatchCallOutputItem(OpenBody):
    """Whether the operation of an `apply_patch_call` was done."""

    type: Literal["apply_patch_call_output"] = "apply_patch_call_output"
    id: Id = Field(default_factory=lambda: new_id("apo"))
    call_id: Id
    status: Literal["completed", "failed"]
    output: str | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.status if not self.output else f"{self.status}: {self.output}"


def _given(action: OpenBody) -> dict[str, Any]:
    shown = action.model_dump(include=set(type(action).model_fields), exclude={"type"}, exclude_none=True)
    return {name: value for name, value in shown.items() if value != {}}


FORM_OF = dict.fromkeys(("custom_tool_call_output", "local_shell_call_output"), "function_call_output")
"""By type: the form of an item, where it is another's."""


class SummaryPart(BaseModel):
    """Thoughts that were asked for as a summary: they are whole."""

    type: Literal["summary_text"] = "summary_text"
    text: str


class ThoughtPart(BaseModel):
    """Thoughts."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """What the model thought before the next items. The thoughts are in `content`, or in `summary` if one is asked for.
    `encrypted_content` has them too, for this server alone, if `include` asks for it.
    """

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: LongList[SummaryPart] = []
    content: LongList[ThoughtPart] = []
    encrypted_content: str | None = None
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        """The thoughts."""
        return "\n".join(part.text for part in self.content or self.summary)


def _form_of(item: object) -> str | None:
    kind = type_of(item)
    if kind != "message":
        return None if kind is None else FORM_OF.get(kind, kind)
    return "output message" if type_of(item, "role") == "assistant" else "input message"


Item = TypeAliasType(
    "Item",
    Annotated[
        Annotated[InputMessageItem, Tag("input message")]
        | Annotated[OutputMessageItem, Tag("output message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
        | Annotated[LocalShellCallItem, Tag("local_shell_call")]
        | Annotated[ShellCallItem, Tag("shell_call")]
        | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
        | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
        | Annotated[ShellCallOutputItem, Tag("shell_call_output")]
        | Annotated[ApplyPatchCallOutputItem, Tag("apply_patch_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_form_of),
    ],
)
CallItem = FunctionCallItem | CustomToolCallItem | LocalShellCallItem | ShellCallItem | ApplyPatchCallItem


def function_of(call: CallItem) -> dict[str, str]:
    """The call as the model has made it: the name of a function, and the JSON of its arguments."""
    arguments: dict[str, Any]
    match call:
        case FunctionCallItem():
            return {"name": flat_name(call.namespace, call.name), "arguments": call.arguments}
        case CustomToolCallItem():
            name, arguments = flat_name(call.namespace, call.name), {"input": call.input}
        case LocalShellCallItem():
            name, arguments = "local_shell", _given(call.action)
        case ShellCallItem():
            name, arguments = "shell", _given(call.action)
        case ApplyPatchCallItem(operation=operation):
            name, arguments = "apply_patch", {"type": operation.type, **_given(operation)}
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


CallOutputItem = FunctionCallOutputItem | ShellCallOutputItem | ApplyPatchCallOutputItem
AnyItem = InputMessageItem | OutputMessageItem | CallItem | CallOutputItem | ReasoningItem
OutputItem = TypeAliasType(
    "OutputItem", Annotated[OutputMessageItem | CallItem | ReasoningItem, Field(discriminator="type")]
)


def without_logprobs(item: AnyItem) -> AnyItem:
    """The item as others go on from it: the log-probabilities stay with the response that they came with."""
    if not isinstance(item, OutputMessageItem):
        return item
    bare = [
        part.model_copy(update={"logprobs": b"[]"}) if isinstance(part, OutputTextPart) else part
        for part in item.content
    ]
    return item.model_copy(update={"content": bare})


class CompactionItem(BaseModel):
    """A summary of a conversation, for this server alone."""

    id: str
    type: Literal["compaction"] = "compaction"
    encrypted_content: str


def new_id(prefix: str) -> str:
    """A fresh id: 128 random bits, so that no client can guess one."""
    return f"{prefix}_{secrets.token_hex(16)}"
