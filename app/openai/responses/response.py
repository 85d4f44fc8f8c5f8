"""A response as answers show it."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from app.domain.values import SamplingParams, TurnUsage
from app.openai.responses.body import ResponseBody
from app.openai.responses.encoded import Encoded, JsonOf
from app.openai.responses.items import AnyItem, Item, OutputItem

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(BaseModel):
    """Where the KV of the input came from."""

    cached_tokens: int
    cache_write_tokens: int = Field(description="tokens whose KV was computed, and is cached from now on")


class OutputTokensDetails(BaseModel):
    """No model here reasons apart from its output."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(BaseModel):
    """Tokens of one response. The input is the whole conversation before it."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, turn: TurnUsage) -> "ResponseUsage":
        """The usage of a response that was this turn."""
        written = turn.prompt_tokens - turn.cached_tokens
        return cls(
            input_tokens=turn.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=turn.cached_tokens, cache_write_tokens=written),
            output_tokens=turn.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=turn.prompt_tokens + turn.completion_tokens,
        )


class ResponseErrorView(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    """One response, and the fields of its request that it was made with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: Literal[False] = False
    error: ResponseErrorView | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: Annotated[Encoded, JsonOf(dict[str, Any])]
    tool_choice: str | dict[str, Any]
    tools: Annotated[Encoded, JsonOf(list[dict[str, Any]])]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]

    @classmethod
    def begin(cls, body: ResponseBody, sampling: SamplingParams, id: str, created_at: int) -> "ResponseObject":
        """The response to `body`, which is sampled so, before its first token."""
        choice = body.tool_choice
        tools = [tool.model_dump(include=set(type(tool).model_fields)) for tool in body.tools]
        return cls(
            id=id,
            created_at=created_at,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=body.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=body.previous_response_id,
            store=body.store,
            temperature=sampling.temperature,
            text=Encoded.of({"format": body.text_format.model_dump(by_alias=True, exclude_none=True)}),
            tool_choice=choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
            tools=Encoded.of(tools),
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            user=body.user,
            metadata=dict(body.metadata or {}),
        )


class DeletedResponse(BaseModel):
    """A response that the server has forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """One page of items."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def page(cls, items: list[AnyItem], *, limit: int) -> "ItemList":
        """The first `limit` of `items`."""
        shown = items[:limit]
        return cls(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(items) > limit,
        )
