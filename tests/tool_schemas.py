"""Two tools, as JSON Schemas of their arguments: small enough for a model of random weights to call."""

from typing import Any

from app.model_store.shapes import EOS_ID

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
ENDS: Any = {str(EOS_ID): 50}
"""What makes the end as likely as any other token: the model never draws it by itself, and would call on and on."""
