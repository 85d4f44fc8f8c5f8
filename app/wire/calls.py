"""What a call of OpenAI's or Anthropic's API asks of its turns, in whichever fields it says so."""

from typing import Any, ClassVar

from pydantic import BaseModel, Field

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar
from app.tools.definitions import ToolUse
from app.tools.support import form_without_effect, loosened
from app.wire.extras import OpenBody
from app.wire.readings import FeaturesReading, ProbeReading
from app.wire.turns import SamplingFields, is_none


class Djinn(BaseModel):
    """What only this server tells of an answer."""

    recomputed_because: str | None = Field(
        None, exclude_if=is_none, description="where the prompt first differs from the session's history"
    )
    probes: list[ProbeReading] | None = Field(
        None,
        exclude_if=is_none,
        description="what the session's probes have found, of all choices; in a stream, lately",
    )
    features: list[FeaturesReading] | None = Field(
        None,
        exclude_if=is_none,
        description="the most active features of the dictionaries that the session reads; in a stream, lately",
    )


DJINN: dict[str, Any] = {
    "djinn": (
        Djinn | None,
        Field(
            None,
            exclude_if=is_none,
            description="if a history was not kept to its end, or probes or features are there",
        ),
    )
}


class CallBody(SamplingFields, OpenBody):
    """Base of the bodies of the generating routes. The rest of the server reads them by these names alone."""

    prompt_field: ClassVar[str] = "messages"
    form_field: ClassVar[str] = ""
    """The field that asks for a form of the answer beside `structured_outputs`, if there is one."""
    has_chat: ClassVar[bool] = True
    """Whether its prompt is a chat, whose answer has thoughts and calls."""

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate."""
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` came in."""
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None to report nothing."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer tells of the prompt's tokens too."""
        return False

    def own_form(self) -> Grammar | None:
        """What `form_field` says."""
        return None

    def to_grammar(self) -> Grammar | None:
        """What the answer must match. Raises `FieldOutOfRange` if two fields say it."""
        asked = self.own_form()
        if asked is not None and self.structured_outputs is not None:
            both = f"give only one of {self.form_field} and structured_outputs"
            raise FieldOutOfRange(both, param=self.form_field)
        return asked or super().to_grammar()

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        return ToolUse()

    def without_effect(self) -> list[str]:
        """The declared fields that change nothing beside the others of this body."""
        form, use = self.to_grammar(), self.to_tool_use()
        return form_without_effect(form, use) + loosened(form, use, self.schema_places())

    def schema_places(self) -> dict[str, str]:
        """The field of the schema of each tool, by the tool's name."""
        return {}
