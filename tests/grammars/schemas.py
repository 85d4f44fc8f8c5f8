"""Random JSON schemas whose texts are short."""

import json
import random
from typing import Any

from app.domain.values import Grammar, GrammarKind

NAMES = ("id", "name", "tags", "a b", "größe", 'quo"te')


def random_schema(seed: int) -> dict[str, Any]:
    return _object(random.Random(seed), 2)


def json_grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "structured_outputs.json")


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text, "structured_outputs.regex")


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(chance, depth - 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _value(chance, depth - 1), "minItems": chance.randint(0, 2), "maxItems": 3}


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    simple: list[dict[str, Any]] = [
        {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 200)},
        {"type": "string", "minLength": chance.randint(0, 2), "maxLength": 5},
        {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+$", "maxLength": 12},
        {"type": ["boolean", "null"]},
        {"enum": ["x", 3, None, {"k": [1, "é"]}]},
        {"const": chance.choice(["c", 1.5, False])},
        {"type": "string", "format": "date"},
    ]
    if depth <= 0:
        return chance.choice(simple)
    nested = chance.choice((_object, _array))
    return chance.choice([*simple, nested(chance, depth), {"anyOf": [nested(chance, depth), chance.choice(simple)]}])
