"""How much is measured, and of what."""

import json
from dataclasses import dataclass

from app.domain.values import Grammar, GrammarKind

DTYPE = "float32"
SETTINGS = {"dtype": DTYPE, "kv_device": "256MiB", "max_model_len": 1024}
WIDTHS = (1, 32)
"""How many sessions decode at once."""
TEMPERATURE = 0.8
PROMPT = "A list of people as JSON:"

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer"},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
PEOPLE = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _PERSON, "minItems": 500}), "schema")
"""Longer than any turn here, so that every turn has as many tokens as one without a grammar."""


@dataclass(frozen=True, slots=True)
class Plan:
    """rounds: of each width, in each of which both kinds of turn have `steps` steps."""

    rounds: int
    steps: int


FULL = Plan(rounds=10, steps=40)
QUICK = Plan(rounds=2, steps=8)
