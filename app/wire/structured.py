"""The form that a turn's text must have, as vLLM's bodies have it."""

import json
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar, GrammarKind
from app.domain.nesting import MAX_NESTING, is_nested_too_deep
from app.wire.base import LongList, WireModel

ANY_OBJECT = '{"type":"object"}'
MAX_CHOICES = 10_000
Choices = Annotated[LongList[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(WireModel):
    """Exactly one of the fields says what the whole text must match."""

    model_config = ConfigDict(serialize_by_alias=True)

    json_schema: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema, or its text")
    regex: str | None = Field(None, description="a regular expression, which the whole text matches")
    choice: Choices | None = Field(None, description="the text is one of these")
    grammar: str | None = Field(None, description="a context-free grammar in llguidance's variant of Lark's syntax")
    json_object: bool | None = Field(None, description="true: any JSON object")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = list(self._forms())
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise FieldOutOfRange(
                f"structured_outputs: give exactly one of json, regex, choice, grammar and json_object, not {found}",
                param="structured_outputs",
            )
        return self

    @model_validator(mode="after")
    def _schema_of_few_levels(self) -> Self:
        if isinstance(self.json_schema, str) and is_nested_too_deep(self.json_schema):
            name = "structured_outputs.json"
            raise FieldOutOfRange(f"{name}: the schema is nested too deep: at most {MAX_NESTING} levels", param=name)
        return self

    @classmethod
    def of(cls, grammar: Grammar) -> Self:
        """The form that leads to this grammar."""
        text = grammar.text
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return cls(json=text)
            case GrammarKind.REGEX:
                return cls(regex=text)
            case GrammarKind.CHOICE:
                return cls(choice=json.loads(text))
            case GrammarKind.LARK:
                return cls(grammar=text)

    def to_grammar(self) -> Grammar:
        """The engine's grammar."""
        ((name, (kind, text)),) = self._forms().items()
        return Grammar(kind, text, f"structured_outputs.{name}")

    def _forms(self) -> dict[str, tuple[GrammarKind, str]]:
        forms = {}
        if self.json_schema is not None:
            forms["json"] = GrammarKind.JSON_SCHEMA, schema_text(self.json_schema)
        if self.regex is not None:
            forms["regex"] = GrammarKind.REGEX, self.regex
        if self.choice is not None:
            forms["choice"] = GrammarKind.CHOICE, json.dumps(self.choice)
        if self.grammar is not None:
            forms["grammar"] = GrammarKind.LARK, self.grammar
        if self.json_object:
            forms["json_object"] = GrammarKind.JSON_SCHEMA, ANY_OBJECT
        return forms


def schema_text(schema: dict[str, Any] | str) -> str:
    """A JSON schema as text. The order of its properties stays: it is that of the answer's."""
    return schema if isinstance(schema, str) else json.dumps(schema)
