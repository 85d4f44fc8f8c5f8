"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.anthropic.content import TextContent
from app.anthropic.messages import MessageInput
from app.anthropic.tools import MAX_TOOLS, ToolChoice, ToolDefinition, tool_use
from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar, GrammarKind
from app.tools.definitions import ToolUse
from app.tools.support import ToolSupport, form_without_effect, turn_grammar
from app.wire.base import MAX_COUNT, LongList, WireModel
from app.wire.extras.body import OpenBody
from app.wire.extras.unsupported import ANTHROPIC
from app.wire.structured import schema_text
from app.wire.turns import SamplingFields, StopString


class MessagesQuery(WireModel):
    """The query of these routes."""

    beta: bool = Field(False, description="SDKs send it with beta features; it changes nothing", strict=False)


class ThinkingDisabled(OpenBody):
    """No thinking: the models' answers are all that they write."""

    type: Literal["disabled"]


class OutputFormat(OpenBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenBody):
    """The form of the answer."""

    format: OutputFormat | None = None


class Metadata(OpenBody):
    """About the call."""

    user_id: str | None = Field(
        None,
        max_length=512,
        description="the caller's name for its end user: metadata of a session that the call opens, as `user`",
    )


class PromptFields(OpenBody):
    """The fields that make the prompt of a call, and those that say what it may call."""

    place: ClassVar[str] = ANTHROPIC

    model: str = Field(description="the served model's name, as /v1/models gives it")
    messages: LongList[MessageInput] = Field(
        min_length=1, description="the last may be of the assistant: it is continued"
    )
    system: TextContent | None = Field(None, description="instructions, in front of the messages")
    tools: list[ToolDefinition] = Field(default=[], max_length=MAX_TOOLS, description="tools to call")
    tool_choice: ToolChoice | None = Field(None, description="what is called (default: auto)")
    thinking: ThinkingDisabled | None = None
    output_config: OutputConfig | None = None

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return tool_use(self.tools, self.tool_choice)


class CountTokensBody(PromptFields):
    """A call whose prompt is to be counted."""


class MessagesBody(SamplingFields, PromptFields):
    """A conversation to go on with."""

    max_tokens: int = Field(ge=0, le=MAX_COUNT, description="most tokens to generate; 0 only computes the prompt")
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] = Field(
        default=[], description="strings that end the answer, whose text ends before them"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    metadata: Metadata | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop_sequences`, and `stop` of other APIs."""
        return *self.stop_sequences, *super().stop_strings

    @property
    def user(self) -> str | None:
        """The caller's name for its end user."""
        return None if self.metadata is None else self.metadata.user_id

    def without_effect(self) -> list[str]:
        """See `OpenBody`."""
        return [*super().without_effect(), *form_without_effect(self.to_grammar(), self.to_tool_use())]

    def to_grammar(self) -> Grammar | None:
        """What the answer must match, from `output_config` or `structured_outputs`."""
        asked = None if self.output_config is None else self.output_config.format
        if asked is None:
            return super().to_grammar()
        if self.structured_outputs is not None:
            raise FieldOutOfRange("give only one of output_config and structured_outputs", param="output_config")
        return Grammar(GrammarKind.JSON_SCHEMA, schema_text(asked.json_schema), "output_config.format.schema")

    def to_turn_grammar(self, use: ToolUse, support: ToolSupport) -> Grammar | None:
        """What holds the turn: the form of the answer, the calls that it may make, or either of them.

        Raises `FieldOutOfRange` for a form that cannot stand beside calls.
        """
        return turn_grammar(self.to_grammar(), use, support)
