"""`response_format`: the form of a chat's answer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.domain.grammar import Grammar, GrammarKind
from app.wire.extras.body import OpenBody
from app.wire.structured import ANY_OBJECT, schema_text


class NamedSchema(OpenBody):
    """A JSON schema, with a name that is the caller's own."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, description="for the caller: the model does not see it")
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="absent: any JSON object")
    strict: bool = Field(False, description="changes nothing: the answer always matches the schema")


class TextFormat(OpenBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(OpenBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(OpenBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def grammar_of(form: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> Grammar | None:
    """The engine's grammar; None if any text will do."""
    if isinstance(form, TextFormat):
        return None
    if isinstance(form, JsonObjectFormat) or form.json_schema.json_schema is None:
        return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "response_format")
    schema = schema_text(form.json_schema.json_schema)
    return Grammar(GrammarKind.JSON_SCHEMA, schema, "response_format.json_schema.schema")
