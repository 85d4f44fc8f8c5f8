"""An error that pydantic found, in the server's own words."""

from collections.abc import Callable, Sequence
from typing import Any

from app.web.errors.field_schema import KEY, Schema, find_field
from app.web.errors.schema_words import allowed, given, limits_of

Problem = dict[str, Any]
"""An error as pydantic describes it."""

OWN_WORDS = frozenset({"value_error", "role", "prompt", "kind", "item", "tool_choice"})
"""Types whose message the models here wrote themselves."""
WORDS: dict[str, Callable[[Problem], str]] = {
    "missing": lambda problem: "required",
    "extra_forbidden": lambda problem: "unknown field",
    "unexpected_keyword_argument": lambda problem: "unknown field",
    "string_unicode": lambda problem: "a string in Unicode; got half of a surrogate pair",
    "bytes_invalid_encoding": lambda problem: f"a string in base64; got {given(problem['input'])}",
    "byte_size": lambda problem: f"a size such as 2GiB; got {given(problem['input'])}",
    "byte_size_unit": lambda problem: f"a size such as 2GiB; got {given(problem['input'])}",
    "json_invalid": lambda problem: "invalid JSON",
}
"""By type. Of any other, the field's schema says what is allowed."""


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
