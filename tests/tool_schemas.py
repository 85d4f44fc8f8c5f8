"""Two tools, as JSON Schemas of their arguments: small enough for a model of random weights to call."""

from __future__ import annotations

from typing import Any

PLACE = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"get_weather": PLACE, "now": ZONE}
