"""The form of the doctor's JSON, from its dataclasses: `python -m tests.doctor.schema > docs/doctor.schema.json`."""

import json
import sys

from pydantic import TypeAdapter

from app.doctor.examination import Report

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_text() -> str:
    schema = {"$schema": DIALECT, **TypeAdapter(Report).json_schema(mode="serialization")}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
