"""The items of a request's `input`."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, assert_never

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from app.openai.responses.items import (
    AnyItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputMessageItem,
    InputTextPart,
    ItemStatus,
    OutputMessageItem,
    OutputTextPart,
    RefusedPart,
    new_id,
)
from app.wire.base import LongList
from app.wire.extras.body import OpenBody

Id = Annotated[str, Field(min_length=1, max_length=256)]
MAX_PARTS = 10_000


class TextBody(OpenBody):
    """Text. `output_text` is what the model said earlier."""

    type: Literal["input_text", "output_text"]
    text: str


class RefusalBody(OpenBody):
    """Text in which a model said earlier that it would not answer."""

    type: Literal["refusal"]
    refusal: str


PART_TAGS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""By type: the form of a part."""


def _part_form(part: object) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return PART_TAGS.get(kind) if isinstance(kind, str) else None


def _content_form(content: object) -> str:
    return "parts" if isinstance(content, list) else "text"


PartBody = TypeAliasType(
    "PartBody",
    Annotated[
        Annotated[TextBody, Tag("text")] | Annotated[RefusalBody, Tag("refusal")],
        Discriminator(
            _part_form,
            custom_error_type="item",
            custom_error_message="a part of type input_text, output_text or refusal: the models here read text",
        ),
    ],
)
ItemContent = TypeAliasType(
    "ItemContent",
    Annotated[
        Annotated[str, Tag("text")]
        | Annotated[LongList[PartBody], Field(min_length=1, max_length=MAX_PARTS), Tag("parts")],
        Discriminator(_content_form),
    ],
)


def _text_of(part: TextBody | RefusalBody) -> str:
    return part.refusal if isinstance(part, RefusalBody) else part.text


class MessageBody(OpenBody):
    """A message. One of the `assistant` is what the model said earlier."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: Id | None = None
    status: ItemStatus | None = None
    phase: str | None = Field(None, max_length=64, description="of OpenAI's own models: has no effect")

    def without_effect(self) -> list[str]:
        """See `OpenBody`."""
        return [] if self.phase is None else ["phase"]

    def to_item(self) -> AnyItem:
        """The item."""
        id = self.id or new_id("msg")
        parts = [TextBody(type="input_text", text=self.content)] if isinstance(self.content, str) else self.content
        if self.role == "assistant":
            said = [
                RefusedPart(refusal=part.refusal) if isinstance(part, RefusalBody) else OutputTextPart(text=part.text)
                for part in parts
            ]
            return OutputMessageItem(id=id, content=said)
        sent = [InputTextPart(text=_text_of(part)) for part in parts]
        return InputMessageItem(id=id, role=self.role, content=sent)


class FunctionCallBody(OpenBody):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: str
    id: Id | None = None
    status: ItemStatus | None = None

    def to_item(self) -> FunctionCallItem:
        """The item."""
        return FunctionCallItem(
            id=self.id or new_id("fc"), call_id=self.call_id, name=self.name, arguments=self.arguments
        )


class FunctionCallOutputBody(OpenBody):
    """What the client's function returned."""

    type: Literal["function_call_output"]
    call_id: Id
    output: ItemContent
    id: Id | None = None
    status: ItemStatus | None = None

    def to_item(self) -> FunctionCallOutputItem:
        """The item."""
        output = self.output
        parts = output if isinstance(output, str) else [InputTextPart(text=_text_of(part)) for part in output]
        return FunctionCallOutputItem(id=self.id or new_id("fco"), call_id=self.call_id, output=parts)


class ReasoningBody(OpenBody):
    """Reasoning of a model. No model here writes or reads it, so the item has no effect."""

    reads_extras: ClassVar[bool] = True

    type: Literal["reasoning"]


class ItemReferenceBody(OpenBody):
    """An item that the server has kept."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


InputItem = MessageBody | FunctionCallBody | FunctionCallOutputBody | ReasoningBody | ItemReferenceBody
FORMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _form_of(item: object) -> str | None:
    if isinstance(item, dict):
        default = "item_reference" if item.keys() == {"id"} else "message"
        kind = item.get("type") or default
    else:
        kind = getattr(item, "type", None)
    return kind if isinstance(kind, str) and kind in FORMS else None


InputItemBody = TypeAliasType(
    "InputItemBody",
    Annotated[
        Annotated[MessageBody, Tag("message")]
        | Annotated[FunctionCallBody, Tag("function_call")]
        | Annotated[FunctionCallOutputBody, Tag("function_call_output")]
        | Annotated[ReasoningBody, Tag("reasoning")]
        | Annotated[ItemReferenceBody, Tag("item_reference")],
        Discriminator(
            _form_of, custom_error_type="item", custom_error_message=f"an item whose type is one of {', '.join(FORMS)}"
        ),
    ],
)


def to_item(body: InputItem, find: Callable[[str], AnyItem]) -> AnyItem | None:
    """The item; None for one without effect. `find` gives a kept item by its id."""
    match body:
        case ReasoningBody():
            return None
        case ItemReferenceBody():
            return find(body.id)
        case MessageBody() | FunctionCallBody() | FunctionCallOutputBody():
            return body.to_item()
        case _:
            assert_never(body)
