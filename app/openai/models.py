"""The bodies of `/v1/models`, `/tokenize` and `/detokenize`."""

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from app.domain.errors import FieldOutOfRange
from app.openai.chat import Message
from app.openai.fields import MAX_TOOLS, FunctionTool, ReasoningEffort, TemplateVariables
from app.text.tokenizer import CharacterLimit
from app.wire.base import LongList, TokenId, View, WireModel, deleted_shape, fixed, shape
from app.wire.calls import OpenBody


class DefaultSampling(View):
    """What the fields of these names are in a call that leaves them out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(BaseModel):
    """A served model. `created` is when the server loaded it, in Unix seconds; `max_model_len` is vLLM's addition.
    `chat_format` is how its answers are read, such as `hermes+think`: its form of calls, and that of its thoughts.

    `root` is the base model's first name, or for a LoRA adapter SHA-256 over its files. `parent` is what an adapter is
    for.

    Breakpoints are after layers 0 to `layers` - 1, where the residual stream has `hidden_size` elements a position.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["djinn"] = "djinn"
    root: str
    parent: str | None = None
    max_model_len: int
    layers: int
    hidden_size: int
    chat_format: str
    default_sampling: DefaultSampling


ModelList = shape(
    "ModelList",
    "All served models: the base under each of its names, then the LoRA adapters.",
    {"object": fixed("list"), "data": [Model]},
)


class LoadModelBody(WireModel):
    """A LoRA adapter to load."""

    name: str = Field(max_length=256, description="what clients will name as their model")
    path: str = Field(max_length=4096, description="its folder, as PEFT has written it, within that of --lora-dir")


class UnloadModelBody(WireModel):
    """A LoRA adapter to unload."""

    name: str = Field(max_length=256)


UnloadedModel = deleted_shape("UnloadedModel", "An adapter that no client can name any more.", "model")


MAX_TOKENIZED = 1 << 20
"""Characters in one call: they take half a second of a processor, and a hundred megabytes."""
CHARACTERS_OF_A_TOKEN = 8
"""At least as many as a token of a long text has on average: a text that fills a context can be counted."""
MAX_DETOKENIZED = 1 << 17
"""Ids in one call: they are decoded without a pause, in a thirtieth of a second."""


def tokenized_limit(field: str, max_model_len: int) -> CharacterLimit:
    """What is tokenized in one call without a turn, whose context has at most `max_model_len` tokens."""
    return CharacterLimit(field, max(MAX_TOKENIZED, CHARACTERS_OF_A_TOKEN * max_model_len))


OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort")


class TokenizeBody(OpenBody):
    """A text or a chat to tokenize."""

    model: str | None = Field(None, description="the served model's name")
    prompt: str | None = None
    messages: LongList[Message] | None = Field(None, min_length=1)
    tools: list[FunctionTool] | None = Field(
        None, max_length=MAX_TOOLS, description="only with messages: functions that the model may call"
    )
    add_special_tokens: bool | None = Field(
        None, description="only with prompt: put around it what the model expects (default true)"
    )
    add_generation_prompt: bool | None = Field(
        None, description="only with messages: open the assistant's turn (default: unless the last one continues)"
    )
    continue_final_message: bool | None = Field(
        None, description="only with messages: leave the last one open (default false)"
    )
    return_token_strs: bool = Field(False, description="also give each token's text")
    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: ReasoningEffort = None

    @property
    def input_field(self) -> str:
        """The field that has the text."""
        return "messages" if self.prompt is None else "prompt"

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            both = self.prompt is not None
            raise FieldOutOfRange("give exactly one of prompt and messages", param="messages" if both else None)
        for name in OF_CHATS:
            if self.messages is None and getattr(self, name) is not None:
                raise FieldOutOfRange(f"{name} is only allowed with messages", param=name)
        if self.prompt is None and self.add_special_tokens is not None:
            raise FieldOutOfRange(
                "add_special_tokens is only allowed with prompt: the chat template has its own",
                param="add_special_tokens",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise FieldOutOfRange(
                "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
            )
        return self


class TokenizeAnswer(BaseModel):
    """The tokens, and how many the model's context has room for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(OpenBody):
    """Tokens to turn into text."""

    model: str | None = Field(None, description="the served model's name")
    tokens: LongList[TokenId] = Field(max_length=MAX_DETOKENIZED)


DetokenizeAnswer = shape(
    "DetokenizeAnswer", "The text, special tokens included. Bytes that are not UTF-8 become U+FFFD.", {"prompt": str}
)
