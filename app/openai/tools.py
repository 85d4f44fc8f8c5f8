"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Discriminator, Field, Tag

from app.tools.definitions import Tool, ToolMode, ToolUse, check_parameters
from app.wire.extras.body import OpenBody

MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]

ToolParameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]


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

    def to_tool(self) -> Tool:
        """The tool."""
        return self.function.to_tool()


class FunctionName(OpenBody):
    """The name of one of the tools."""

    name: ToolName


class NamedTool(OpenBody):
    """One of the tools by its name."""

    type: Literal["function"]
    function: FunctionName

    def to_use(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse:
        """See `tool_use`."""
        return use_of_one(tools, self.function.name)


class AllowedTools(OpenBody):
    """The tools that may be called, of those that the model sees."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(OpenBody):
    """The model calls some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def to_use(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse:
        """See `tool_use`."""
        chosen = self.allowed_tools
        names = frozenset(each.function.name for each in chosen.tools)
        return ToolUse.of(tools, ToolMode(chosen.mode), names, parallel=parallel)


def _form_of(choice: object) -> str | None:
    if isinstance(choice, str):
        return "word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return {"function": "named tool", "allowed_tools": "allowed tools"}.get(kind) if isinstance(kind, str) else None


CHOICE_BY_FORM = Discriminator(
    _form_of,
    custom_error_type="tool_choice",
    custom_error_message="none, auto, required, or an object of type function or allowed_tools",
)
ChoiceWord = Annotated[Literal["none", "auto", "required"], Tag("word")]
ToolChoice = Annotated[
    ChoiceWord | Annotated[NamedTool, Tag("named tool")] | Annotated[AllowedToolsChoice, Tag("allowed tools")],
    CHOICE_BY_FORM,
]


class ChoiceOfTools(Protocol):
    """A `tool_choice` that names tools."""

    def to_use(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse: ...


def use_of_one(tools: Sequence[Tool], name: str) -> ToolUse:
    """The use of one call of that tool. Raises `FieldOutOfRange` if there is none."""
    return ToolUse.of(tools, ToolMode.REQUIRED, frozenset({name}), parallel=False)


def tool_use(tools: Sequence[Tool], choice: str | ChoiceOfTools | None, *, parallel: bool) -> ToolUse:
    """What a turn may do with the tools. Raises `FieldOutOfRange` if the fields do not fit together."""
    if choice is None:
        choice = ToolMode.AUTO if tools else ToolMode.NONE
    if isinstance(choice, str):
        return ToolUse.of(tools, ToolMode(choice), None, parallel=parallel)
    return choice.to_use(tools, parallel=parallel)


def parallel_without_effect(tools: Sequence[object], *, parallel: bool) -> list[str]:
    """`parallel_tool_calls`, where there are no tools that it could narrow."""
    return [] if parallel or tools else ["parallel_tool_calls"]
