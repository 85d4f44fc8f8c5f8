"""What a rejected request is told: the field, what the field takes, and what it was given. Never pydantic's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic.fields import FieldInfo

from app.domain.errors import DjinnError, FieldOutOfRange, MalformedRequest
from app.web.field_schema import KEY, Schema, find_field, schema_of
from app.web.schema_words import allowed, given, limits_of

SHOWN_PROBLEMS = 3
Problem = dict[str, Any]
"""An error as pydantic describes it."""

OWN_WORDS = frozenset({"value_error", "role", "prompt"})
"""Types whose message the models here wrote themselves."""
WORDS: dict[str, Callable[[Problem], str]] = {
    "missing": lambda problem: "required",
    "extra_forbidden": lambda problem: "unknown field",
    "unexpected_keyword_argument": lambda problem: "unknown field",
    "string_unicode": lambda problem: "a string in Unicode; got half of a surrogate pair",
    "json_invalid": lambda problem: "invalid JSON",
}
"""By type. Of any other, the field's schema says what is allowed."""


def describe_validation(request: Request, error: RequestValidationError) -> DjinnError:
    """The first problems of a rejected request."""
    problems = error.errors()
    first = problems[0]
    if first["loc"] == ("body",) and first["type"] == "string_unicode":
        return FieldOutOfRange("the body has a field whose name is not Unicode: half of a surrogate pair")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return MalformedRequest("the body must be a JSON object, sent with Content-Type: application/json")
    described = []
    for problem in problems[:SHOWN_PROBLEMS]:
        place, *location = problem["loc"]
        described.append(describe_problem(_schema(request, place), problem, location))
    sentences = [f"{field}: {words}" if field else words for field, words in described]
    return FieldOutOfRange("; ".join(sentences), param=described[0][0] or None)


def describe_problem(root: Schema, problem: Problem, location: Sequence[str | int]) -> tuple[str, str]:
    """The field at `location` of a value that `root` describes, and what is wrong with it."""
    kind = problem["type"]
    field, schemas = find_field(root, location)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        # No schema has a name for it.
        return ".".join(filter(None, (field, str(location[-1])))), WORDS[kind](problem)
    if kind in OWN_WORDS:
        return field, problem["msg"].removeprefix("Value error, ")
    return field, WORDS[kind](problem) if kind in WORDS else _compared(schemas, problem)


def _compared(schemas: list[Schema], problem: Problem) -> str:
    """What is allowed, and what came instead."""
    limits = limits_of(problem.get("ctx", {}))
    if limits:
        schemas = [{"type": "number", **limits, **schema} for schema in schemas or [{}]]
    whose = "its name: " if KEY in problem["loc"][-1:] else ""
    return f"{whose}{allowed(schemas)}; got {given(problem['input'])}"


def _schema(request: Request, place: str) -> Schema:
    """That of the whole body or query, or of all headers that the route reads."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if place == "header":
        types = {field.alias: Annotated[field.annotation, *field.metadata] for field in _headers(route.dependant)}
        return {"properties": {str(name): schema_of(each) for name, each in types.items()}}
    field = route.body_field if place == "body" else route.dependant.query_params[0]
    assert field is not None
    return schema_of(field.field_info.annotation)


def _headers(dependant: Dependant) -> Iterator[FieldInfo]:
    yield from (field.field_info for field in dependant.header_params)
    for each in dependant.dependencies:
        yield from _headers(each)
