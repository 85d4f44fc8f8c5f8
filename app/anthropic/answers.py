"""The answers of `/v1/messages`, whole and streamed."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field
from pydantic_core import from_json, to_json

from app.anthropic.messages import ID_PREFIX
from app.domain.values import FinishReason
from app.messages import Reading, Started, TurnFinished
from app.text.generation import TextChunk, TextItem
from app.tools.reader import Answer, CallArguments, CallBegun, Content, Piece, Reasoning
from app.tools.thinking import Seal
from app.web.errors import messages_error_body, visible_error
from app.web.sse import sse_event
from app.wire.base import fixed, is_none, list_of, shape, streamed_events, union_of
from app.wire.turns import DJINN, djinn_of

Event = dict[str, Any]
"""One event of a stream; `type` is its name."""


DELTA_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def whole_message(events: Iterable[Event]) -> Event:
    """Put an answer together from the events that a stream of it has."""
    message: Event = {}
    texts: list[list[str]] = []
    for event in events:
        match event["type"]:
            case "message_start":
                message = {**event["message"], "content": []}
            case "content_block_start":
                message["content"].append(event["content_block"])
                texts.append([])
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "signature_delta":
                    message["content"][-1]["signature"] = delta["signature"]
                else:
                    texts[-1].append(delta[DELTA_FIELDS[delta["type"]]])
            case "ping":
                for kind, readings in event["djinn"].items():
                    message.setdefault("djinn", {}).setdefault(kind, []).extend(readings)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for block, pieces in zip(message["content"], texts, strict=True):
        if block["type"] != "tool_use":
            block[block["type"]] = "".join(pieces)
        else:
            block["input"] = _input("".join(pieces))
    return message


def _input(text: str) -> dict[str, Any]:
    """A call's arguments; of those that the end of the answer cut off, what came before it."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(prompt: int, cached: int, generated: int) -> dict[str, int]:
    """A `MessageUsage`: `cached` tokens of the prompt had their KV already."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


class MessageWriter:
    """Writes the events of one answer. Whole and streamed answers are made of the same events.

    The first event waits for the turn to leave the queue: it tells how much of the prompt had its KV already.
    """

    def __init__(
        self,
        made: Mapping[str, Any],
        prompt_tokens: int,
        answer: Answer,
        *,
        on_calls: Callable[[Sequence[str]], None],
        seal: Seal,
        shows_thoughts: bool,
        thinks: bool,
    ) -> None:
        """`made` are fields of the message: its `model`, and what is told of its prompt. `on_calls` is told the tools
        that the answer has called, before its last events. `thinks`: the model does, and `seal` signs its thoughts,
        which are in the signature alone unless the call `shows_thoughts`.
        """
        self._seal = seal
        self._shows_thoughts = shows_thoughts
        self._thinks = thinks
        self._thoughts: list[str] = []
        """Those of the block that is open."""
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", **made}
        self._prompt_tokens = prompt_tokens
        self._answer = answer
        self._on_calls = on_calls
        self._has_begun = False
        self._blocks = 0
        self._open: str | None = None
        """Type of the block that is open."""

    def events(self, item: TextItem) -> Iterator[Event]:
        """What the turn's next item gives."""
        if not self._has_begun:
            self._has_begun = True
            yield self._start(item.cached_tokens if isinstance(item, Started) else 0)
        if isinstance(item, Reading):
            yield {"type": "ping", **djinn_of([item])}  # SDKs pass over it
        elif isinstance(item, TextChunk):
            yield from self._deltas(self._answer.pieces(item))
        elif isinstance(item, TurnFinished):
            yield from self._end(item)

    def _start(self, cached: int) -> Event:
        usage = _usage(self._prompt_tokens, cached, 0)
        message: Event = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return {"type": "message_start", "message": message}

    def _deltas(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            match piece:
                case Content() if piece.text:
                    if self._open != "text":
                        yield from self._open_block({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": piece.text})
                case Reasoning():
                    if self._open != "thinking":
                        yield from self._open_block({"type": "thinking", "thinking": "", "signature": ""})
                    self._thoughts.append(piece.text)
                    if self._shows_thoughts:
                        yield self._delta({"type": "thinking_delta", "thinking": piece.text})
                case CallBegun():
                    call_id = ID_PREFIX + piece.id.rpartition("_")[2]
                    yield from self._open_block({"type": "tool_use", "id": call_id, "name": piece.name, "input": {}})
                case CallArguments():
                    yield self._delta({"type": "input_json_delta", "partial_json": piece.text})

    def _open_block(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close_block()
        self._open = block["type"]
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _close_block(self) -> Iterator[Event]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._seal.close("".join(self._thoughts))})
            self._thoughts.clear()
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._blocks - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _end(self, finished: TurnFinished) -> Iterator[Event]:
        left = list(self._deltas(self._answer.pieces(finished)))
        reason = self._stop_reason(finished)
        if reason == "tool_use":
            self._on_calls(self._answer.calls)
        yield from left
        yield from self._close_block()
        cost = finished.usage
        usage: Event = {**_usage(cost.prompt_tokens, cost.cached_tokens, cost.completion_tokens)}
        if self._thinks:
            usage["output_tokens_details"] = {"thinking_tokens": self._answer.reasoning_tokens}
        stopped = {"stop_reason": reason, "stop_sequence": self._answer.stop if reason == "stop_sequence" else None}
        yield {"type": "message_delta", "delta": stopped, "usage": usage}
        yield {"type": "message_stop"}

    def _stop_reason(self, finished: TurnFinished) -> str:
        """A call that the end of the answer may have cut off is not to be made."""
        if finished.reason is FinishReason.LENGTH:
            return "max_tokens"
        if finished.reason is FinishReason.PROBE:
            return "refusal"
        if self._answer.calls:
            return "tool_use"
        return "end_turn" if self._answer.stop is None else "stop_sequence"


Items = AsyncIterator[tuple[int, TextItem]]
"""The items of the call's only choice, each with that choice's index."""


Keep = Callable[[Event], None]
"""Takes a whole answer, before the client has its last event."""


async def stream(
    items: Items, writer: MessageWriter, request_id: str, keep: Keep | None = None
) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. An error after the stream has begun is an event too, the last."""
    told: list[Event] = []
    try:
        async for _, item in items:
            for event in writer.events(item):
                if keep is not None:
                    told.append(event)
                    if event["type"] == "message_stop":
                        keep(whole_message(told))
                yield sse_event(event["type"], orjson.dumps(event))
    except Exception as error:
        yield sse_event("error", messages_error_body(visible_error(error), request_id))


async def collect(items: Items, writer: MessageWriter, keep: Keep | None = None) -> bytes:
    """The JSON of the whole answer. An input that a model wrote may have integers of more than 64 bits."""
    whole = whole_message([event async for _, item in items for event in writer.events(item)])
    if keep is not None:
        keep(whole)
    return to_json(whole, inf_nan_mode="null")


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
TextAnswer = shape("TextAnswer", "What the model says.", {"type": fixed("text"), "text": str})
ToolUseAnswer = shape(
    "ToolUseAnswer",
    "A call that the client is to make; it sends the result in a block with this id.",
    {"type": fixed("tool_use"), "id": str, "name": str, "input": dict[str, Any]},
)
ThinkingAnswer = shape(
    "ThinkingAnswer",
    "What the model thinks. The signature is for the server alone, which takes the block back.",
    {"type": fixed("thinking"), "thinking": str, "signature": str},
)
AnswerBlock = union_of("AnswerBlock", "type", TextAnswer, ToolUseAnswer, ThinkingAnswer)
MessageTokensDetails = shape(
    "MessageTokensDetails",
    "Tokens up to the end of the model's thoughts, with what marks them.",
    {"thinking_tokens": int},
)
MessageUsage = shape(
    "MessageUsage",
    "Tokens of one call. The prompt is the sum of the three kinds of input.",
    {
        "input_tokens": (int, Field(description="tokens of the prompt whose KV was computed")),
        "cache_creation_input_tokens": (int, Field(0, description="always 0: all KV stays, and none costs more")),
        "cache_read_input_tokens": (int, Field(description="tokens of the prompt whose KV was there")),
        "output_tokens": int,
        "output_tokens_details": (
            MessageTokensDetails | None,
            Field(None, exclude_if=is_none, description="only of a model that thinks, when the answer has ended"),
        ),
    },
)
MessageAnswer = shape(
    "MessageAnswer",
    "The model's answer. `stop_sequence` is the one of the call's that ended it.",
    {
        "id": str,
        "type": fixed("message"),
        "role": fixed("assistant"),
        "model": str,
        "usage": MessageUsage,
        "content": [AnswerBlock],
        "stop_reason": StopReason,
        "stop_sequence": str | None,
        **DJINN,
    },
)
TokenCount = shape("TokenCount", "The tokens of a prompt.", {"input_tokens": int})
MessagesErrorDetail = shape(
    "MessagesErrorDetail",
    "What went wrong; the message names the field at fault.",
    {
        "type": Literal[
            "invalid_request_error",
            "authentication_error",
            "permission_error",
            "not_found_error",
            "request_too_large",
            "rate_limit_error",
            "api_error",
            "overloaded_error",
        ],
        "message": str,
        "details": (dict[str, str], Field({}, description="only of a thread: the `error_code` thread_not_found")),
    },
)
MessagesErrorBody = shape(
    "MessagesErrorBody",
    "The body of every error answer on these routes, and the data of an `error` event.",
    {"type": "error", "error": MessagesErrorDetail, "request_id": str | None},
)

BegunMessage = shape(
    "BegunMessage",
    "An answer before its first block.",
    {
        "id": str,
        "type": "message",
        "role": "assistant",
        "model": str,
        "usage": MessageUsage,
        "content": (list_of(TextAnswer), Field(max_length=0)),
        "stop_reason": None,
        "stop_sequence": None,
        **DJINN,
    },
)
_DELTAS: Any = Annotated[
    shape("TextDelta", "The next text of a block.", {"type": "text_delta", "text": str})
    | shape(
        "InputJsonDelta",
        "The next piece of the JSON text of a call's input.",
        {"type": "input_json_delta", "partial_json": str},
    )
    | shape("ThinkingDelta", "The next thoughts of a block.", {"type": "thinking_delta", "thinking": str})
    | shape(
        "SignatureDelta",
        "The signature of a block of thinking, before its end.",
        {"type": "signature_delta", "signature": str},
    ),
    Discriminator("type"),
]
StoppedDelta = shape("StoppedDelta", "Why the answer ended.", {"stop_reason": StopReason, "stop_sequence": str | None})
MessageEvent = streamed_events(
    "MessageEvent",
    "A server-sent event of a streamed message. `data` is the JSON text of a `StreamedMessage` of the type `event`.",
    "StreamedMessage",
    shape(
        "MessageStart",
        "The turn has left the queue. The usage has the tokens of the prompt.",
        {"type": "message_start", "message": BegunMessage},
    ),
    shape(
        "ContentBlockStart",
        "A block begins: a text without a character, or a call without its input.",
        {"type": "content_block_start", "index": int, "content_block": AnswerBlock},
    ),
    shape("ContentBlockDelta", "A block goes on.", {"type": "content_block_delta", "index": int, "delta": _DELTAS}),
    shape("ContentBlockStop", "A block is whole.", {"type": "content_block_stop", "index": int}),
    shape(
        "MessageDelta",
        "The answer has ended. The usage is that of the whole call.",
        {"type": "message_delta", "delta": StoppedDelta, "usage": MessageUsage},
    ),
    shape("MessagePing", "What has been read inside the model lately.", {"type": "ping", **DJINN}),
    shape("MessageStop", "The last event of an answer without an error.", {"type": "message_stop"}),
    MessagesErrorBody,
)
