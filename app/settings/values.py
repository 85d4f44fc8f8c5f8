"""Values of settings, as flags and variables have them."""

import os
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import ByteSize, PlainValidator, TypeAdapter, ValidationError

from app.domain.values import KVBudget


def not_empty(value: object) -> object:
    """Raises `ValueError` for an empty path."""
    if value == "":
        raise ValueError("name a folder; '.' is the current one")
    return value


def none_or_path(value: object) -> object:
    """`none` is None. Raises `ValueError` for an empty path."""
    return None if value == "none" else not_empty(value)


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


def is_traced(endpoint: str | None) -> bool:
    """Whether there is a collector, from the flag or from a variable, and no variable turns traces off."""
    is_off = _variable("OTEL_SDK_DISABLED").lower() == "true" or _variable("OTEL_TRACES_EXPORTER").lower() == "none"
    return not is_off and (endpoint is not None or any(map(_variable, ENDPOINTS)))


def check_endpoint(endpoint: str | None) -> None:
    """Raise `ValueError` if spans cannot be sent there."""
    if endpoint is not None:
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise ValueError(f"{endpoint!r} is no address of a collector: a URL such as http://127.0.0.1:4318")
        if url.path.rstrip("/").endswith(TRACES_PATH):
            raise ValueError(f"{endpoint!r} must end before {TRACES_PATH}, which Djinn adds")


def named_by(endpoint: str | None) -> str:
    """What names the collector: the setting of `endpoint`, or the variable that does without."""
    return "otlp_endpoint" if endpoint is not None else next(filter(_variable, ENDPOINTS), ENDPOINTS[-1])


def _variable(name: str) -> str:
    """What it says; empty if it is not set."""
    return os.environ.get(name, "").strip()
