"""The content of messages: a text, or a list of blocks."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from app.wire.base import LongList
from app.wire.extras.body import OpenBody


class TextBlock(OpenBody):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(OpenBody):
    """A call that the assistant made earlier."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: str = Field(min_length=1, max_length=256)
    input: dict[str, Any]


def _form(content: object) -> str:
    return "list of blocks" if isinstance(content, list) else "plain text"


def _kind_of(*kinds: str) -> Callable[[object], str | None]:
    """Tells which of the `kinds` a block is."""

    def kind(block: object) -> str | None:
        found = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return found if found in kinds else None

    return kind


TextContent = TypeAliasType(
    "TextContent",
    Annotated[
        Annotated[str, Tag("plain text")] | Annotated[LongList[TextBlock], Tag("list of blocks")], Discriminator(_form)
    ],
)


class ToolResultBlock(OpenBody):
    """What a tool answered to the call of that id."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: TextContent = ""
    is_error: bool = Field(False, description="the model reads `Error: ` in front of the content")

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"Error: {text_of(self.content)}" if self.is_error else text_of(self.content)


UserBlock = TypeAliasType(
    "UserBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")] | Annotated[ToolResultBlock, Tag("tool_result")],
        Discriminator(
            _kind_of("text", "tool_result"),
            custom_error_type="kind",
            custom_error_message="a block of type text or tool_result: the models here read text",
        ),
    ],
)
AssistantBlock = TypeAliasType(
    "AssistantBlock",
    Annotated[
        Annotated[TextBlock, Tag("text")] | Annotated[ToolUseBlock, Tag("tool_use")],
        Discriminator(
            _kind_of("text", "tool_use"),
            custom_error_type="kind",
            custom_error_message="a block of type text or tool_use: the models here write text and calls",
        ),
    ],
)
UserContent = Annotated[
    Annotated[str, Tag("plain text")] | Annotated[LongList[UserBlock], Tag("list of blocks")], Discriminator(_form)
]
AssistantContent = Annotated[
    Annotated[str, Tag("plain text")] | Annotated[LongList[AssistantBlock], Tag("list of blocks")], Discriminator(_form)
]


def text_of(content: str | Iterable[TextBlock]) -> str:
    """The content as one text: blocks are lines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
