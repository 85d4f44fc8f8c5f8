"""`text.format`: the form of a response's text."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.domain.grammar import Grammar, GrammarKind
from app.wire.extras.body import OpenBody
from app.wire.structured import ANY_OBJECT, schema_text


class TextFormat(OpenBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(OpenBody):
    """Any JSON object."""

    type: Literal["json_object"]


class FlatJsonSchemaFormat(OpenBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, description="for the caller: the model does not see it")
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(False, description="changes nothing: the answer always matches the schema")


FlatFormat = Annotated[TextFormat | JsonObjectFormat | FlatJsonSchemaFormat, Field(discriminator="type")]


class TextConfig(OpenBody):
    """How the text is written."""

    format: FlatFormat | None = Field(None, description="the form that the text must have (default: any text)")

    def to_grammar(self) -> Grammar | None:
        """The engine's grammar; None if any text will do."""
        match self.format:
            case None | TextFormat():
                return None
            case JsonObjectFormat():
                return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "text.format")
            case FlatJsonSchemaFormat():
                return Grammar(GrammarKind.JSON_SCHEMA, schema_text(self.format.json_schema), "text.format.schema")
