"""Values of settings, as flags and variables have them."""

import os
import re
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, PlainValidator, TypeAdapter, ValidationError

from app.domain.values import KVBudget


def not_empty(value: object) -> object:
    """Raises `ValueError` for an empty path."""
    if value == "":
        raise ValueError("name a folder; '.' is the current one")
    return value


def none_or_path(value: object) -> object:
    """`none` is None. Raises `ValueError` for an empty path."""
    return None if value == "none" else not_empty(value)


def words(what: str) -> BeforeValidator:
    """Takes words that commas separate, or a list of them, but no empty one. `what` is what each is."""

    def split(value: object) -> object:
        found = value.split(",") if isinstance(value, str) else value
        if isinstance(found, list | tuple) and "" in found:
            raise ValueError(f"empty {what}: each has at least 1 character")
        return tuple(found) if isinstance(found, list) else found

    return BeforeValidator(split)


def none_if_auto(value: object) -> object:
    """`auto` is None."""
    return None if value == "auto" else value


def _parse_budget(value: object) -> KVBudget | None:
    """Bytes as pydantic's `ByteSize` reads them, or `SESSIONSxTOKENS`; `auto` is None."""
    if value is None or isinstance(value, KVBudget):
        return value
    if value == "auto":
        return None
    sessions = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value) if isinstance(value, str) else None
    if sessions is not None:
        return KVBudget(sessions=int(sessions[1]), tokens=int(sessions[2]))
    try:
        size = TypeAdapter(ByteSize).validate_python(value)
    except ValidationError:
        raise ValueError(f"{value!r} is neither auto, nor bytes such as 2GiB, nor sessions such as 20x1024") from None
    if size < 0:
        raise ValueError(f"{value!r} is less than 0 bytes")
    return KVBudget(bytes=int(size))


Budget = Annotated[KVBudget | None, PlainValidator(_parse_budget, json_schema_input_type=str | int)]
"""Bytes, or sessions of so many tokens."""


TRACES_PATH = "/v1/traces"
"""Where a collector takes spans, below its address."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def named_by(endpoint: str | None) -> str:
    """What names the collector: the setting of `endpoint`, or the variable that does without."""
    return "otlp_endpoint" if endpoint is not None else next(filter(variable, ENDPOINTS), ENDPOINTS[-1])


def variable(name: str) -> str:
    """What it says; empty if it is not set."""
    return os.environ.get(name, "").strip()
