"""What a rejected request is told: the field, what the field takes, and what it was given. Never pydantic's words."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from app.domain.errors import DjinnError, FieldOutOfRange, MalformedRequest
from app.web.errors.field_schema import Schema, schema_of
from app.web.errors.problems import describe_problem

SHOWN_PROBLEMS = 3
ELSEWHERE = {"query": " in the query string", "header": " as a header"}
"""Where a missing field belongs, if not in the body."""


def describe_validation(request: Request, error: RequestValidationError) -> DjinnError:
    """The first problems of a rejected request."""
    problems = error.errors()
    first = problems[0]
    if first["loc"] == ("body",) and first["type"] == "string_unicode":
        return FieldOutOfRange("the body has a field whose name is not Unicode: half of a surrogate pair")
    if first["loc"] == ("body",) and first["type"] != "value_error":
        return MalformedRequest("the body must be a JSON object, sent with Content-Type: application/json")
    return _refusal(_described(request, problem) for problem in problems[:SHOWN_PROBLEMS])


def describe_body(model: type[BaseModel], error: ValidationError) -> DjinnError:
    """The first problems of a body that came by another way than a request."""
    problems = error.errors()[:SHOWN_PROBLEMS]
    return _refusal(describe_problem(schema_of(model), dict(problem), problem["loc"]) for problem in problems)


def _described(request: Request, problem: dict[str, Any]) -> tuple[str, str]:
    """The field that `problem` is about, and what is wrong with it. A missing one is looked for in the body first."""
    place, *location = problem["loc"]
    field, words = describe_problem(_schema(request, place), problem, location)
    return field, words + (ELSEWHERE.get(place, "") if problem["type"] == "missing" else "")


def _refusal(problems: Iterable[tuple[str, str]]) -> DjinnError:
    described = list(problems)
    # Both forms that a field may have can say the same.
    sentences = dict.fromkeys(f"{field}: {words}" if field else words for field, words in described)
    return FieldOutOfRange("; ".join(sentences), param=described[0][0] or None)


def _schema(request: Request, place: str) -> Schema:
    """That of the whole body or query, or of all headers that the route reads."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    if place == "header":
        types = {field.alias: Annotated[field.annotation, *field.metadata] for field in _headers(route.dependant)}
        return {"properties": {str(name): schema_of(each) for name, each in types.items()}}
    field = route.body_field if place == "body" else route.dependant.query_params[0]
    assert field is not None
    model: Any = field.field_info.annotation
    return schema_of(model)


def _headers(dependant: Dependant) -> Iterator[FieldInfo]:
    yield from (field.field_info for field in dependant.header_params)
    for each in dependant.dependencies:
        yield from _headers(each)
