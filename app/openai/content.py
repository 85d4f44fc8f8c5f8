"""The content of a chat's messages: a text, or a list of parts that are text."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from app.wire.base import LongList
from app.wire.extras.body import OpenBody


class TextPart(OpenBody):
    """One part of a message's content; only text, the models served here neither see nor hear."""

    type: Literal["text"]
    text: str


class RefusalPart(OpenBody):
    """A part in which the model said that it would not answer: text too."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


def _content_form(content: object) -> str:
    return "list of parts" if isinstance(content, list) else "plain text"


def _part_form(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "refusal part" if kind == "refusal" else "text part"


AssistantPart = TypeAliasType(
    "AssistantPart",
    Annotated[
        Annotated[TextPart, Tag("text part")] | Annotated[RefusalPart, Tag("refusal part")], Discriminator(_part_form)
    ],
)
Content = TypeAliasType(
    "Content",
    Annotated[
        Annotated[str, Tag("plain text")] | Annotated[LongList[TextPart], Field(min_length=1), Tag("list of parts")],
        Discriminator(_content_form),
    ],
)
AssistantContent = TypeAliasType(
    "AssistantContent",
    Annotated[
        Annotated[str, Tag("plain text")]
        | Annotated[LongList[AssistantPart], Field(min_length=1), Tag("list of parts")],
        Discriminator(_content_form),
    ],
)


def text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The content as one text: parts are lines, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
