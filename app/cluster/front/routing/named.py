"""What the bodies of calls and of answers name."""

from __future__ import annotations

import codecs
from typing import Any

import orjson


def previous_response(content: bytes) -> str | None:
    """The response or conversation that a call goes on from. None also for a body that a replica will refuse."""
    fields = _fields_of(content)
    held = fields.get("conversation")
    found = held.get("id") if isinstance(held, dict) else held
    value = fields.get("previous_response_id") if found is None else found
    return value if isinstance(value, str) else None


def field_of(content: bytes, name: str) -> str | None:
    """A string of a JSON object; None if there is none of that name."""
    value = _fields_of(content).get(name)
    return value if isinstance(value, str) else None


def _fields_of(content: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(content.removeprefix(codecs.BOM_UTF8))  # as replicas read it
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
