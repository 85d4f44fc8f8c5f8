"""The body of `POST /v1/responses`."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar
from app.openai.fields import MAX_TOP_LOGPROBS
from app.openai.responses.input_items import InputItemBody, ReasoningBody, to_item
from app.openai.responses.items import AnyItem, InputMessageItem, InputTextPart, new_id
from app.openai.responses.text_format import FlatFormat, TextConfig, TextFormat
from app.openai.responses.tools import FlatFunctionTool, FlatToolChoice
from app.openai.tools import MAX_TOOLS, parallel_without_effect, tool_use
from app.tools.definitions import ToolUse
from app.tools.support import form_without_effect
from app.wire.base import MAX_COUNT, LongList
from app.wire.extras.body import OpenBody
from app.wire.extras.unsupported import RESPONSES
from app.wire.sessions import Metadata
from app.wire.turns import SamplingFields

MAX_ITEMS = 100_000
LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""

Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[LongList[InputItemBody], Field(min_length=1, max_length=MAX_ITEMS), Tag("items")],
    Discriminator(lambda value: "items" if isinstance(value, list) else "text"),
]


class ResponseStreamOptions(OpenBody):
    """Options of a streamed response: none has an effect."""


class ResponseBody(SamplingFields, OpenBody):
    """A response to generate. `input` is what is new since the response `previous_response_id`."""

    place: ClassVar[str] = RESPONSES

    model: str = Field(description="the served model's name, as /v1/models gives it")
    input: Input = Field(description="a text of the user, or items")
    instructions: str | None = Field(None, description="the system's message in front; of this response only")
    previous_response_id: str | None = Field(None, min_length=1, max_length=256, description="goes on after it")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="most tokens to generate (default: what the context has room for)"
    )
    tools: list[FlatFunctionTool] = Field(default=[], max_length=MAX_TOOLS, description="functions to call")
    tool_choice: FlatToolChoice | None = Field(None, description="what is called (default: auto with tools, else none)")
    parallel_tool_calls: bool = Field(True, description="a response may hold several calls")
    text: TextConfig | None = Field(None, description="how the text is written")
    store: bool = Field(True, description="keep the response, to be read and continued")
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata | None = Field(None, description="the caller's own labels, which the response returns")
    truncation: Literal["disabled"] = Field("disabled", description="the server never shortens a conversation")
    background: Literal[False] = Field(False, description="no response runs without a client")
    include: list[Annotated[str, Field(max_length=256)]] = Field(
        default=[], max_length=64, description=f"{LOGPROBS} or top_logprobs asks for log-probabilities"
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="alternatives to report per token")
    user: str | None = Field(
        None, max_length=512, description="the caller's name for its end user: metadata of a session that opens"
    )

    @field_validator("max_tokens")
    @classmethod
    def _has_another_name(cls, max_tokens: int) -> int:
        raise ValueError("is max_output_tokens here")

    @field_validator("tools", mode="before")
    @classmethod
    def _functions_only(cls, tools: Any) -> Any:
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else "function"
            if kind not in ("function", None):
                name = f"tools.{index}.type"
                raise FieldOutOfRange(f"{name}: only functions of the client, not {str(kind)[:64]!r}", param=name)
        return tools

    def without_effect(self) -> list[str]:
        """See `OpenBody`."""
        items = () if isinstance(self.input, str) else self.input
        unread = [f"input.{index}" for index, item in enumerate(items) if isinstance(item, ReasoningBody)]
        unread += form_without_effect(self.to_grammar(), self.to_tool_use())
        unread += parallel_without_effect(self.tools, parallel=self.parallel_tool_calls)
        return unread + [f"include.{index}" for index, name in enumerate(self.include) if name != LOGPROBS]

    def items(self, find: Callable[[str], AnyItem]) -> list[AnyItem]:
        """The items of `input`. `find` gives a kept item by its id, and raises `NotFound`."""
        if isinstance(self.input, str):
            text = InputTextPart(text=self.input)
            return [InputMessageItem(id=new_id("msg"), role="user", content=[text])]
        found = (to_item(body, find) for body in self.input)
        return [item for item in found if item is not None]

    def to_grammar(self) -> Grammar | None:
        """What the text must match, from `text.format` or `structured_outputs`."""
        asked = None if self.text is None else self.text.to_grammar()
        if asked is not None and self.structured_outputs is not None:
            raise FieldOutOfRange("give only one of text.format and structured_outputs", param="text.format")
        return asked or super().to_grammar()

    @property
    def text_format(self) -> FlatFormat:
        """The form that the text must have."""
        asked = None if self.text is None else self.text.format
        return asked or TextFormat(type="text")

    def to_tool_use(self) -> ToolUse:
        """What the turn may do with its tools. Raises `FieldOutOfRange` if their fields do not fit together."""
        tools = [tool.to_tool() for tool in self.tools]
        return tool_use(tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report per token; None to report nothing."""
        if self.top_logprobs is None:
            return 0 if LOGPROBS in self.include else None
        return self.top_logprobs
