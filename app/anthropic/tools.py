"""`tools` and `tool_choice`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from app.tools.definitions import Tool, ToolMode, ToolUse, check_parameters
from app.wire.extras.body import OpenBody

MAX_TOOLS = 128
ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]


class ToolDefinition(OpenBody):
    """A tool of the client: its purpose, and the JSON Schema of its input."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Annotated[dict[str, Any], AfterValidator(check_parameters)]
    strict: bool = Field(False, description="the input follows the schema even where the model decides to call")

    def to_tool(self) -> Tool:
        """The tool."""
        return Tool(self.name, self.description, self.input_schema, self.strict)


class AutoChoice(OpenBody):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool = False

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode.AUTO, None, parallel=not self.disable_parallel_tool_use)


class AnyChoice(OpenBody):
    """The model calls at least one tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool = False

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode.REQUIRED, None, parallel=not self.disable_parallel_tool_use)


class NamedChoice(OpenBody):
    """The model calls this tool."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        named = frozenset({self.name})
        return ToolUse.of(tools, ToolMode.REQUIRED, named, parallel=not self.disable_parallel_tool_use)


class NoChoice(OpenBody):
    """The model calls nothing."""

    type: Literal["none"]

    def to_use(self, tools: Sequence[Tool]) -> ToolUse:
        """See `tool_use`."""
        return ToolUse.of(tools, ToolMode.NONE, None, parallel=True)


def _kind_of(choice: object) -> str | None:
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return kind if kind in ("auto", "any", "tool", "none") else None


ToolChoice = Annotated[
    Annotated[AutoChoice, Tag("auto")]
    | Annotated[AnyChoice, Tag("any")]
    | Annotated[NamedChoice, Tag("tool")]
    | Annotated[NoChoice, Tag("none")],
    Discriminator(_kind_of, custom_error_type="kind", custom_error_message="an object of type auto, any, tool or none"),
]


def tool_use(tools: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolUse:
    """What a turn may do with the tools. Raises `FieldOutOfRange` if the fields do not fit together."""
    return (choice or AutoChoice(type="auto")).to_use([tool.to_tool() for tool in tools])
