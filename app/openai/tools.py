"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat."""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from app.domain.errors import FieldOutOfRange
from app.openai.extras.body import OpenAIBody
from app.tools.definitions import Tool, ToolMode, ToolUse

MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class FunctionDefinition(OpenAIBody):
    """What a function is for, and the JSON Schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON Schema; absent: it takes no arguments")
    strict: bool = Field(False, description="the arguments follow the schema, whoever chooses the function")


class FunctionTool(OpenAIBody):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def to_tool(self) -> Tool:
        """The tool."""
        about = self.function
        return Tool(about.name, about.description, about.parameters, about.strict)


class FunctionName(OpenAIBody):
    """The name of one of the tools."""

    name: ToolName


class NamedTool(OpenAIBody):
    """One of the tools by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(OpenAIBody):
    """The tools that may be called, of those that the model sees."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(OpenAIBody):
    """The model calls some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _form_of(choice: object) -> str | None:
    if isinstance(choice, str):
        return "word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return {"function": "named tool", "allowed_tools": "allowed tools"}.get(kind) if isinstance(kind, str) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named tool")]
    | Annotated[AllowedToolsChoice, Tag("allowed tools")],
    Discriminator(
        _form_of,
        custom_error_type="tool_choice",
        custom_error_message="none, auto, required, or an object of type function or allowed_tools",
    ),
]


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool) -> ToolUse:
    """What a turn may do with the tools. Raises `FieldOutOfRange` if the fields do not fit together."""
    names = frozenset(tool.name for tool in tools)
    twice = [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]
    if twice:
        raise FieldOutOfRange(f"tools: {twice[0]!r} is there twice", param="tools")
    if choice is None:
        choice = "auto" if tools else "none"
    match choice:
        case str():
            mode, allowed = ToolMode(choice), names
        case NamedTool():
            mode, allowed = ToolMode.REQUIRED, frozenset({choice.function.name})
        case AllowedToolsChoice():
            chosen = choice.allowed_tools
            mode, allowed = ToolMode(chosen.mode), frozenset(each.function.name for each in chosen.tools)
    if unknown := sorted(allowed - names):
        raise FieldOutOfRange(f"tool_choice: there is no tool {unknown[0]!r} in tools", param="tool_choice")
    if mode is ToolMode.REQUIRED and not tools:
        raise FieldOutOfRange("tool_choice: required needs at least 1 of tools", param="tool_choice")
    single = isinstance(choice, NamedTool)
    return ToolUse(tuple(tools), mode if tools else ToolMode.NONE, allowed, parallel and not single)
