"""The object of a response, and the conversation that it continues."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from app.domain.errors import FieldOutOfRange, WrongState
from app.domain.values import SamplingParams, SessionState, TurnUsage
from app.openai.response_input import ResponseBody
from app.openai.response_items import (
    AnyItem,
    ApplyPatchCallItem,
    ApplyPatchCallOutputItem,
    CallItem,
    CallOutputItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputMessageItem,
    Item,
    JsonOf,
    LocalShellCallItem,
    OutputItem,
    OutputMessageItem,
    ReasoningItem,
    ShellCallItem,
    ShellCallOutputItem,
    encoded,
    function_of,
    without_logprobs,
)
from app.openai.response_tools import HostedTool
from app.sessions.session import Session
from app.sessions.table import has_expired
from app.tools.replay import Chat
from app.wire.base import deleted_shape, fixed, is_none, shape
from app.wire.calls import OpenBody, bare
from app.wire.turns import Djinn

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputTokensDetails(BaseModel):
    """Where the KV of the input came from."""

    cached_tokens: int
    cache_write_tokens: int = Field(description="tokens whose KV was computed, and is cached from now on")


class OutputTokensDetails(BaseModel):
    """What the output was."""

    reasoning_tokens: int = Field(0, description="tokens up to the end of the thoughts, with what marks them")


class ResponseUsage(BaseModel):
    """Tokens of one response. The input is the whole conversation before it."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, turn: TurnUsage, reasoning_tokens: int = 0) -> ResponseUsage:
        """The usage of a response that was this turn."""
        written = turn.prompt_tokens - turn.cached_tokens
        return cls(
            input_tokens=turn.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=turn.cached_tokens, cache_write_tokens=written),
            output_tokens=turn.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=turn.prompt_tokens + turn.completion_tokens,
        )


class ResponseErrorView(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


AS_ASKED = (
    *("background", "instructions", "max_output_tokens", "model", "parallel_tool_calls", "previous_response_id"),
    *("store", "user"),
)
"""Fields of a request that its response has too."""
CONVERSATION = "conv"
"""What the id of a conversation begins with that a client has opened by itself."""


class ConversationRef(BaseModel):
    """The conversation that a response belongs to."""

    id: str


class ResponseObject(BaseModel):
    """One response, and the fields of its request that it was made with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: ResponseErrorView | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationRef | None = None
    store: bool
    temperature: float
    text: Annotated[bytes, JsonOf(dict[str, Any])]
    tool_choice: str | dict[str, Any]
    tools: Annotated[bytes, JsonOf(list[dict[str, Any]])]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled", "auto"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    djinn: Djinn | None = Field(None, exclude_if=is_none, description="if a history was not kept to its end")

    @classmethod
    def begin(cls, body: ResponseBody, sampling: SamplingParams, id: str, created_at: int) -> ResponseObject:
        """The response to `body`, which is sampled so, before its first token."""
        choice = body.tool_choice
        used = [tool for tool in body.tools if not isinstance(tool, HostedTool)]
        tools = [tool.model_dump(include=set(type(tool).model_fields)) for tool in used]
        return cls(
            **{name: getattr(body, name) for name in AS_ASKED},
            id=id,
            created_at=created_at,
            status="queued" if body.background else "in_progress",
            output=[],
            conversation=None if body.conversation is None else ConversationRef(id=body.conversation.id),
            temperature=sampling.temperature,
            text=encoded({"format": body.text_format.model_dump(by_alias=True, exclude_none=True)}),
            tool_choice=bare(choice).model_dump(exclude_none=True)
            if isinstance(choice, OpenBody)
            else choice or "auto",
            tools=encoded(tools),
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            metadata=dict(body.metadata or {}),
        )

    @classmethod
    def of_items(cls, id: str, model: str) -> ResponseObject:
        """Stands for items of a conversation that came without a response. No client sees it."""
        body = ResponseBody.model_construct(model=model, input=[])
        return cls.begin(body, SamplingParams(seed=0), id, int(time.time())).model_copy(update={"status": "completed"})


_LEFT_OUT = Field(description="the oldest items, which the context had no room for: the summary lacks them")
Shortened = shape(
    "Shortened", "What only this server tells of a shortened conversation.", {"left_out": (int, _LEFT_OUT)}
)
CompactedResponse = shape(
    "CompactedResponse",
    "A conversation, shortened: the user's messages, and a summary of it.",
    {
        "id": str,
        "object": fixed("response.compaction"),
        "created_at": int,
        "output": [InputMessageItem | CompactionItem],
        "usage": ResponseUsage | None,
        "djinn": (
            Shortened | None,
            Field(None, exclude_if=is_none, description="if the context had no room for all of it"),
        ),
    },
)
InputTokens = shape(
    "InputTokens", "The length of a prompt.", {"object": fixed("response.input_tokens"), "input_tokens": int}
)
DeletedResponse = deleted_shape("DeletedResponse", "A response that the server has forgotten.", "response")


ItemList = shape(
    "ItemList",
    "One page of items.",
    {"object": fixed("list"), "data": [Item], "first_id": str | None, "last_id": str | None, "has_more": bool},
)


IDLE_S = 24 * 3600
"""Seconds without a response after which a conversation is forgotten, whatever its session's own limit."""
CONTINUABLE = ("completed", "incomplete")
UNDER_WAY = ("queued", "in_progress")


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response. Its input begins at item `start` of its conversation."""

    conversation: Conversation
    start: int
    input: Sequence[AnyItem]
    answer: ResponseObject
    is_deleted: bool = False
    """Whether only its items are kept, for the responses after it."""
    size: int = 0
    """Bytes of JSON that are kept of it."""

    @property
    def can_continue(self) -> bool:
        """Whether a conversation may go on after it."""
        return self.answer.status in CONTINUABLE

    @property
    def context(self) -> list[AnyItem]:
        """All items up to its end that are left."""
        items = [*self.conversation.items[: self.start], *self.input, *map(without_logprobs, self.answer.output)]
        return self.conversation.left_of(items)


@dataclass(slots=True, eq=False)
class Conversation:
    """Responses in one session, each the continuation of the one before."""

    id: str
    session: Session
    is_kept: bool
    """Whether its responses are stored; otherwise they live as long as a connection, or a call."""
    owns_session: bool = True
    """Whether the session was opened for it, and closes with it."""
    items: list[AnyItem] = field(default_factory=list)
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    """Ids of items that a client has removed."""
    latest: StoredResponse | None = None
    """The end of the conversation."""
    is_running: bool = False
    used_at: float = field(default_factory=time.time)

    def add(self, response: StoredResponse) -> None:
        """Take in a response that is over. It is the end of the conversation if it can be continued."""
        self.responses[response.answer.id] = response
        self.used_at = time.time()
        if response.can_continue:
            self.items += [*response.input, *map(without_logprobs, response.answer.output)]
            self.latest = response

    @property
    def head(self) -> StoredResponse | None:
        """What stands for the items that a client has opened it with; None: it began with a response."""
        return self.responses.get(self.id) if self.id.startswith(CONVERSATION) else None

    def left_of(self, items: list[AnyItem]) -> list[AnyItem]:
        """Those of its items that no client has removed."""
        return [item for item in items if item.id not in self.removed] if self.removed else items

    def check_not_removed(self, items: Iterable[AnyItem], *, param: str = "input") -> None:
        """Raise `FieldOutOfRange` for new items with an id that a client has removed: no response would see them."""
        for item in items:
            if item.id in self.removed:
                raise FieldOutOfRange.at(param, f"item {item.id[:100]} was removed from the conversation")

    def require_rest(self) -> None:
        """Raise `WrongState` while a response of it is being generated."""
        if self.is_running:
            raise WrongState("a response of the conversation is being generated: one runs at a time. Cancel it first")

    @property
    def is_dead(self) -> bool:
        """Whether its session has closed, or it was unused for long."""
        session = self.session
        return session.state is SessionState.CLOSED or has_expired(session) or self.used_at + IDLE_S < time.time()

    def goes_on_after(self, response: StoredResponse) -> bool:
        """Whether the next response after `response` may be computed in the session as it is now."""
        return response is self.latest and not self.is_running and self.session.state is SessionState.IDLE


def to_chat(instructions: str | None, items: Iterable[AnyItem]) -> Chat:
    """The instructions, then the items, as chat templates read them. Calls belong to the assistant's message before,
    thoughts to the one after them.
    """
    chat: Chat = [] if instructions is None else [{"role": "system", "content": instructions}]
    thoughts: dict[str, str] = {}
    for item in items:
        match item:
            case ReasoningItem():
                before = thoughts.get("reasoning_content")
                thoughts["reasoning_content"] = f"{before}\n{item.text}" if before else item.text
            case (
                FunctionCallItem()
                | CustomToolCallItem()
                | LocalShellCallItem()
                | ShellCallItem()
                | ApplyPatchCallItem()
            ):
                if not chat or chat[-1]["role"] != "assistant" or thoughts:
                    chat.append({"role": "assistant", "content": "", **thoughts})
                    thoughts = {}
                call = {"id": item.call_id, "type": "function", "function": function_of(item)}
                chat[-1].setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem() | ShellCallOutputItem() | ApplyPatchCallOutputItem():
                chat.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
            case InputMessageItem() | OutputMessageItem():
                role = "system" if item.role == "developer" else item.role
                chat.append({"role": role, "content": "\n".join(part.text for part in item.content)})
                if role == "assistant":
                    chat[-1] |= thoughts
                thoughts = {}
    return chat


def check_calls(before: Sequence[AnyItem], new: Sequence[AnyItem], *, param: str = "input") -> None:
    """Raise `FieldOutOfRange` for an output among the `new` items whose call comes nowhere before it."""
    called = {item.call_id for item in before if isinstance(item, CallItem)}
    for item in new:
        if isinstance(item, CallItem):
            called.add(item.call_id)
        elif isinstance(item, CallOutputItem) and item.call_id not in called:
            kind = item.type.removesuffix("_output")
            raise FieldOutOfRange.at(param, f"there is no {kind} with call_id {item.call_id[:100]!r} before its output")
