"""What requests and answers of the OpenAI surface have in common."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.tools.definitions import Tool, ToolMode, ToolUse, check_parameters
from app.wire.base import MAX_COUNT, type_of
from app.wire.calls import CallBody, OpenBody
from app.wire.turns import MAX_SEED, json_form

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


class StreamOptions(OpenBody):
    """Options of a streamed answer."""

    include_usage: bool = Field(False, description="end with a chunk that has the usage and no choices")
    continuous_usage_stats: bool = Field(
        False, description="every chunk has its choice's usage so far, as in vLLM; only with include_usage"
    )

    def without_effect(self) -> Iterable[str]:
        """`continuous_usage_stats`, where no usage is told."""
        return ["continuous_usage_stats"] if self.continuous_usage_stats and not self.include_usage else []


class GenerationFields(CallBody):
    """The fields that both generating routes share.

    A `seed` may be any integer. Seeds from 0 to 2^63 - 1 are taken as they are; any other is taken modulo 2^63, so
    that -1 is the seed 2^63 - 1.
    """

    model: str = Field(description="the served model's name, as /v1/models gives it")
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices per prompt")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    seed: int | None = Field(
        None, description="any integer: outside 0 to 2^63 - 1 it is taken modulo 2^63; drawn by the server if absent"
    )
    user: str | None = Field(
        None,
        max_length=512,
        description="the caller's name for its end user: metadata of a session that the call opens; ignored where the "
        "call is bound to a session that is open already, which keeps its own",
    )

    @field_validator("seed")
    @classmethod
    def _take_modulo(cls, seed: int) -> int:
        return seed % (MAX_SEED + 1)

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


MAX_TOOLS = 1024
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]

ToolParameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]


TemplateVariables = Annotated[
    dict[str, Any] | None,
    Field(max_length=64, description="variables of the model's chat template, such as enable_thinking"),
]


ReasoningEffort = Annotated[
    str | None,
    Field(max_length=32, description="how much the model thinks, as its chat template takes it; none: not at all"),
]


ThinkingBudget = Annotated[
    int | None, Field(ge=0, le=MAX_COUNT, description="tokens after which the model ends its thoughts and answers")
]


class FunctionDefinition(OpenBody):
    """What a function is for, and the JSON Schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: ToolParameters | None = Field(None, description="a JSON Schema; absent: it takes no arguments")
    strict: bool = Field(
        False, description="the arguments follow the schema, also where the model chooses the function"
    )

    def to_tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.parameters, self.strict)


class FunctionTool(OpenBody):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(OpenBody):
    """The name of one of the tools."""

    name: ToolName


class NamedTool(OpenBody):
    """One of the tools by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(OpenBody):
    """The tools that may be called, of those that the model sees."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(OpenBody):
    """The model calls some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(
        lambda choice: "word" if isinstance(choice, str) else type_of(choice),
        custom_error_type="tool_choice",
        custom_error_message="none, auto, required, or an object of type function or allowed_tools",
    ),
]


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool) -> ToolUse:
    """What a turn may do with the tools. Raises `FieldOutOfRange` if the fields do not fit together."""
    match choice:
        case NamedTool():
            return ToolUse.of(tools, ToolMode.REQUIRED, frozenset({choice.function.name}), parallel=False)
        case AllowedToolsChoice(allowed_tools=allowed):
            names = frozenset(each.function.name for each in allowed.tools)
            return ToolUse.of(tools, ToolMode(allowed.mode), names, parallel=parallel)
        case _:
            return ToolUse.of(tools, ToolMode(choice or "auto"), None, parallel=parallel)


def parallel_without_effect(tools: Sequence[object], *, parallel: bool) -> list[str]:
    """`parallel_tool_calls`, where there are no tools that it could narrow."""
    return [] if parallel or tools else ["parallel_tool_calls"]


class NamedSchema(OpenBody):
    """A JSON schema, with a name that is the caller's own."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, description="for the caller: the model does not see it")
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="absent: any JSON object")
    strict: bool = Field(False, description="changes nothing: the answer always matches the schema")


class ResponseFormat(OpenBody):
    """Any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="only with type json_schema, and required there")
    bare_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="only with type json_object: what other servers take there"
    )

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            given = "missing" if self.json_schema is None else f"not allowed with type {self.type}"
            raise FieldOutOfRange.at("response_format.json_schema", given)
        if self.bare_schema is not None and self.type != "json_object":
            given = f"not allowed with type {self.type}"
            raise FieldOutOfRange.at("response_format.schema", given)
        return self

    def to_grammar(self) -> Grammar | None:
        """The engine's grammar; None if any text will do."""
        if self.type == "text":
            return None
        if self.bare_schema is not None:
            return json_form(self.bare_schema, "response_format.schema")
        schema = None if self.json_schema is None else self.json_schema.json_schema
        return json_form(schema, "response_format" if schema is None else "response_format.json_schema.schema")
