"""`response_format`: the form of a chat's answer."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar, GrammarKind
from app.wire.extras.body import OpenBody
from app.wire.structured import ANY_OBJECT, schema_text


class NamedSchema(OpenBody):
    """A JSON schema, with a name that is the caller's own."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    description: str | None = Field(None, description="for the caller: the model does not see it")
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="absent: any JSON object")
    strict: bool = Field(False, description="changes nothing: the answer always matches the schema")


class ResponseFormat(OpenBody):
    """Any text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="only with type json_schema, and required there")

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            given = "missing" if self.json_schema is None else f"not allowed with type {self.type}"
            raise FieldOutOfRange(f"response_format.json_schema: {given}", param="response_format.json_schema")
        return self

    def to_grammar(self) -> Grammar | None:
        """The engine's grammar; None if any text will do."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.json_schema is None:
            return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "response_format")
        schema = schema_text(self.json_schema.json_schema)
        return Grammar(GrammarKind.JSON_SCHEMA, schema, "response_format.json_schema.schema")
