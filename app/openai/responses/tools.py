"""`tools` and `tool_choice` of a response: flat, where those of a chat are nested."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from app.openai.tools import (
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    FunctionName,
    NamedTool,
    ToolChoice,
    ToolName,
    ToolParameters,
)
from app.tools.definitions import Tool
from app.wire.extras.body import OpenBody


class FlatFunctionTool(OpenBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: ToolParameters | None = Field(None, description="a JSON Schema; absent: any object")
    strict: bool = Field(False, description="the arguments follow the schema, whoever chooses the function")

    def to_tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.parameters, self.strict)


class FlatNamedTool(OpenBody):
    """One of the tools by its name."""

    type: Literal["function"]
    name: ToolName

    def nested(self) -> NamedTool:
        """The same as a chat has it."""
        return NamedTool(type="function", function=FunctionName(name=self.name))


class FlatAllowedTools(OpenBody):
    """The model calls some of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatNamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


def _form_of(choice: object) -> str | None:
    if isinstance(choice, str):
        return "word"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return {"function": "named tool", "allowed_tools": "allowed tools"}.get(kind) if isinstance(kind, str) else None


FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FlatNamedTool, Tag("named tool")]
    | Annotated[FlatAllowedTools, Tag("allowed tools")],
    Discriminator(
        _form_of,
        custom_error_type="tool_choice",
        custom_error_message="none, auto, required, or an object of type function or allowed_tools",
    ),
]


def nested_choice(choice: FlatToolChoice | None) -> ToolChoice | None:
    """The same as a chat has it."""
    match choice:
        case FlatNamedTool():
            return choice.nested()
        case FlatAllowedTools():
            allowed = AllowedTools(mode=choice.mode, tools=[tool.nested() for tool in choice.tools])
            return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
        case _:
            return choice
