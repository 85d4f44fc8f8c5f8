"""What a rejected request is told: which field, what was wrong with it, and what is allowed."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel

from app.domain.errors import DjinnError, FieldOutOfRange, MalformedRequest

SHOWN_PROBLEMS = 3
BOUNDS = {"ge": "greater than or equal to", "gt": "greater than", "le": "less than or equal to", "lt": "less than"}
"""Attributes that bounds have, and pydantic's words for them."""
OUT_OF_BOUNDS = frozenset({"greater_than_equal", "greater_than", "less_than_equal", "less_than"})
NO_FIELD = frozenset({"", "[key]"})
"""Parts of a pydantic location that name no field."""


def describe_validation(request: Request, error: RequestValidationError) -> DjinnError:
    """The first problems of a rejected request, each with its field and what the field allows."""
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return MalformedRequest(f"the body is not valid JSON: {first['ctx']['error']}")
    if first["loc"] == ("body",) and first["type"] == "string_unicode":
        return FieldOutOfRange("the body has a field whose name is not Unicode: half of a surrogate pair")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return MalformedRequest("the body must be a JSON object, sent with Content-Type: application/json")
    shown = []
    for problem in problems[:SHOWN_PROBLEMS]:
        field, message = _field(problem["loc"]), _message(request, problem)
        shown.append(f"{field}: {message}" if field else message)
    return FieldOutOfRange("; ".join(shown), param=_field(first["loc"]) or None)


def _message(request: Request, problem: dict[str, Any]) -> str:
    """Pydantic's words; for a number out of bounds those of both its ends, of which pydantic names only one."""
    bounds = _bounds(request, problem["loc"]) if problem["type"] in OUT_OF_BOUNDS else []
    if bounds:
        return f"Input should be {' and '.join(bounds)}"
    message: str = problem["msg"]
    return message.removeprefix("Value error, ")


def _bounds(request: Request, location: tuple[str | int, ...]) -> list[str]:
    """What a number at the top level of the body or query may be."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if len(location) != 2:
        return []
    fields = [route.body_field] if location[0] == "body" else route.dependant.query_params
    models = [field.field_info.annotation for field in fields if field is not None]
    found = []
    for model in models:
        if isinstance(model, type) and issubclass(model, BaseModel) and location[1] in model.model_fields:
            limits = model.model_fields[str(location[1])].metadata
            found += [
                f"{BOUNDS[kind]} {getattr(each, kind)}" for each in limits for kind in BOUNDS if hasattr(each, kind)
            ]
    return found


def _field(location: tuple[str | int, ...]) -> str:
    """Dotted path of a field, without the place (`body`, `query`) in front.

    Members of a union are tagged with names of several words, so that they can be left out too.
    """
    return ".".join(str(part) for part in location[1:] if part not in NO_FIELD and " " not in str(part))
