"""The published form of a result, from the dataclass that it is."""

import json
from typing import Any

from pydantic import TypeAdapter

from loadgen.results.files import SCHEMA_VERSION, Result

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(kind: type[Result]) -> dict[str, Any]:
    """What `write_result` writes of such a report, as a JSON schema that knows no other version of it."""
    schema = TypeAdapter(kind).json_schema(mode="serialization")
    schema["properties"]["schema_version"]["const"] = SCHEMA_VERSION
    return {"$schema": DIALECT, **schema}


def schema_text(kind: type[Result]) -> str:
    """The schema as its file has it."""
    return json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n"
