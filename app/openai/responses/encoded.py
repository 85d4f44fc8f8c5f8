"""Parts of a response that are JSON as long as the server has them: nothing reads them but the client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson
from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Encoded:
    """The JSON of a value: a tenth of its size as objects. `to_json` copies it into that of the model around it."""

    json: bytes

    @classmethod
    def of(cls, value: Any) -> Encoded:
        """The JSON of `value`. Its integers may have more than 64 bits, as in a client's JSON schema."""
        try:
            return cls(orjson.dumps(value))
        except TypeError:
            return cls(json.dumps(value).encode())


NOTHING = Encoded(b"[]")


class JsonOf:
    """Annotates a field that is `Encoded`: `form` is the type of its value, which the API's document shows."""

    def __init__(self, form: Any) -> None:
        self._form = form

    @cached_property
    def _form_schema(self) -> CoreSchema:
        return TypeAdapter(self._form).core_schema

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        """Takes what is encoded as it is, and encodes what the journal has."""
        copied = core_schema.plain_serializer_function_ser_schema(_fragment)
        return core_schema.no_info_plain_validator_function(_encoded, serialization=copied)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """That of the value."""
        return handler(self._form_schema)


def to_json(model: BaseModel) -> bytes:
    """The JSON of a model that may have encoded parts."""
    return orjson.dumps(model.model_dump())


def _encoded(value: Any) -> Encoded:
    return value if isinstance(value, Encoded) else Encoded.of(value)


def _fragment(encoded: Encoded) -> orjson.Fragment:
    return orjson.Fragment(encoded.json)
