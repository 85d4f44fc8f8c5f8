"""What the bodies of calls and of answers name."""

from __future__ import annotations

import codecs

import orjson


def previous_response(content: bytes) -> str | None:
    """The response that a call goes on from. None also for a body that a replica will refuse."""
    return field_of(content, "previous_response_id")


def field_of(content: bytes, name: str) -> str | None:
    """A string of a JSON object; None if there is none of that name."""
    try:
        fields = orjson.loads(content.removeprefix(codecs.BOM_UTF8))  # as replicas read it
    except orjson.JSONDecodeError:
        return None
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, str) else None
