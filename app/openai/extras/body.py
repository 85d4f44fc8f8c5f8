"""The base of the request bodies of other people's APIs: a client may say more than this server knows."""

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from app.wire.base import WireModel


def _allow_null(schema: dict[str, Any]) -> None:
    """Say in the JSON schema what `OpenAIBody` does with nulls."""
    fields: dict[str, dict[str, Any]] = schema["properties"]
    for name in fields.keys() - set(schema.get("required", ())):
        about = {key: value for key, value in fields[name].items() if key in ("title", "description", "default")}
        rest = {key: value for key, value in fields[name].items() if key not in about}
        fields[name] = about | {"anyOf": [rest, {"type": "null"}]}


class OpenAIBody(WireModel):
    """A body, or an object in one, that keeps unknown fields in `model_extra`; `IgnoredFields` accounts for them.

    Its optional fields may also be null, which means the same as leaving them out. The OpenAI API documents nearly all
    of its fields so, and SDK users pass `None` to them.
    """

    model_config = ConfigDict(json_schema_extra=_allow_null, extra="allow")

    place: ClassVar[str] = ""
    """Of a whole body: its part of the table of unsupported fields."""
    reads_extras: ClassVar[bool] = False
    """Whether unknown fields have a reader, who then tells which of them change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in optional}

    def without_effect(self) -> Iterable[str]:
        """The declared fields that change nothing beside the others of this body."""
        return ()
