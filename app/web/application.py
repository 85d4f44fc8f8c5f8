"""The application's description of itself."""

from typing import Any

from fastapi import FastAPI

FRAMEWORK_SCHEMAS = ("HTTPValidationError", "ValidationError")


class DescribedAPI(FastAPI):
    """FastAPI without the 422 that it adds to each route that documents none: no route here answers with that."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, built once."""
        if self.openapi_schema is None:
            document = super().openapi()
            for operations in document["paths"].values():
                for operation in operations.values():
                    _drop_framework_refusal(operation["responses"])
            for name in FRAMEWORK_SCHEMAS:
                document["components"]["schemas"].pop(name, None)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _drop_framework_refusal(responses: dict[str, Any]) -> None:
    content = responses.get("422", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").endswith(FRAMEWORK_SCHEMAS[0]):
        del responses["422"]
