"""`tools` and `tool_choice` of a response: flat, where those of a chat are nested."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, Tag

from app.openai.tools import CHOICE_BY_FORM, MAX_TOOLS, ChoiceWord, FunctionDefinition, ToolName, use_of_one
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.wire.extras.body import OpenBody


class FlatFunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class FlatNamedTool(OpenBody):
    """One of the tools by its name."""

    type: Literal["function"]
    name: ToolName

    def to_use(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse:
        """See `tool_use`."""
        return use_of_one(tools, self.name)


class FlatAllowedTools(OpenBody):
    """The model calls some of the tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatNamedTool] = Field(min_length=1, max_length=MAX_TOOLS)

    def to_use(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode(self.mode), frozenset(each.name for each in self.tools), parallel=parallel)


FlatToolChoice = Annotated[
    ChoiceWord | Annotated[FlatNamedTool, Tag("named tool")] | Annotated[FlatAllowedTools, Tag("allowed tools")],
    CHOICE_BY_FORM,
]
