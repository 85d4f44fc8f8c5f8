"""What clients read of chats, continuations and streamed responses: the API's document shows it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from app.openai.response import ResponseObject
from app.openai.response_items import OutputItem, OutputTextPart, SummaryPart, ThoughtPart
from app.wire.base import ErrorBody, chunk_event, fixed, is_none, list_of, one_of, scored_shape, shape, streamed_events
from app.wire.sessions import Metadata
from app.wire.turns import DJINN

PromptTokensDetails = shape("PromptTokensDetails", "Where the prompt's KV came from.", {"cached_tokens": int})
CompletionTokensDetails = shape(
    "CompletionTokensDetails",
    "Tokens up to the end of the model's thoughts, with what marks them.",
    {"reasoning_tokens": int},
)
Usage = shape(
    "Usage",
    "Tokens of one call. A prompt counts once, however many choices it has.",
    {
        "prompt_tokens": int,
        "completion_tokens": int,
        "total_tokens": int,
        "prompt_tokens_details": PromptTokensDetails,
        "completion_tokens_details": (
            CompletionTokensDetails | None,
            Field(None, exclude_if=is_none, description="only of a chat, and of a model that thinks"),
        ),
    },
)
_THOUGHT = Field(None, exclude_if=is_none, description="what the model thought, under two names")
THOUGHTS = {"reasoning_content": (str | None, _THOUGHT), "reasoning": (str | None, _THOUGHT)}

MADE = {"created": int, "model": str, "system_fingerprint": str}
"""What an answer says of its making, and each of its chunks."""
CHUNK_HEAD = {"id": str, **MADE, "usage": (Usage | None, None)}
"""`usage` is there if `stream_options` ask for it."""

_TOKEN = {"token": str, "logprob": float, "bytes": [int]}
TokenAlternative = shape(
    "TokenAlternative",
    "A token that could stand at a position. `bytes` are its UTF-8 bytes: a character can span tokens.",
    _TOKEN,
)
ChatTokenLogprob = scored_shape("ChatTokenLogprob", TokenAlternative, _TOKEN)
ChatLogprobs = shape(
    "ChatLogprobs",
    "One entry for each generated token, those that ended the answer included.",
    {"content": [ChatTokenLogprob], "refusal": (None, None)},
)
AnswerFunction = shape(
    "AnswerFunction",
    "A function and its arguments: the text of a JSON object, as the model wrote it.",
    {"name": str, "arguments": str},
)
AnswerToolCall = shape(
    "AnswerToolCall",
    "A call that the client is to make; it sends the result in a message with this id.",
    {"id": str, "type": fixed("function"), "function": AnswerFunction},
)
AnswerMessage = shape(
    "AnswerMessage",
    "What the model says.",
    {
        "role": fixed("assistant"),
        "content": (str | None, Field(description="null where the answer is only calls")),
        "refusal": (None, None),
        **THOUGHTS,
        "tool_calls": (list_of(AnswerToolCall) | None, Field(None, exclude_if=is_none)),
    },
)
ChatChoice = shape(
    "ChatChoice",
    "One answer.",
    {
        "index": int,
        "message": AnswerMessage,
        "logprobs": ChatLogprobs | None,
        "finish_reason": Literal["stop", "length", "tool_calls", "content_filter"],
    },
)
ChatCompletion = shape(
    "ChatCompletion",
    "The answers to one chat. `system_fingerprint` changes when equal seeds may give other results.",
    {
        "id": str,
        "object": fixed("chat.completion"),
        **MADE,
        "choices": [ChatChoice],
        "usage": Usage,
        "metadata": Metadata | None,
        **DJINN,
    },
)

FunctionDelta = shape(
    "FunctionDelta",
    "What comes next of a call: first the name, then the text of the arguments, piece by piece.",
    {"name": (str | None, None), "arguments": str},
)
ToolCallDelta = shape(
    "ToolCallDelta",
    "What comes next of the call with that index; `id` and `type` come first.",
    {"index": int, "id": (str | None, None), "type": (Literal["function"] | None, None), "function": FunctionDelta},
)
ChatDelta = shape(
    "ChatDelta",
    "What comes next in a message; `role` comes first, by itself. A field that brings nothing is absent.",
    {
        "role": (Literal["assistant"] | None, None),
        "content": (str | None, None),
        **THOUGHTS,
        "tool_calls": (list_of(ToolCallDelta) | None, None),
    },
)
ChatChunkChoice = shape(
    "ChatChunkChoice",
    "The next piece of one answer; the last has a `finish_reason`.",
    {
        "index": int,
        "delta": ChatDelta,
        "logprobs": ChatLogprobs | None,
        "finish_reason": Literal["stop", "length", "tool_calls", "content_filter"] | None,
    },
)
ChatCompletionChunk = shape(
    "ChatCompletionChunk",
    "A piece of a streamed chat.",
    {**CHUNK_HEAD, **DJINN, "object": "chat.completion.chunk", "choices": [ChatChunkChoice]},
)
ChatCompletionEvent = chunk_event(
    "ChatCompletionEvent",
    "A server-sent event of a streamed chat. `data` is the JSON text of a `ChatCompletionChunk`; after an error, that\n"
    "of an `ErrorBody`; in the last event of a stream without an error `[DONE]`.",
    ChatCompletionChunk | ErrorBody,
)

CompletionLogprobs = shape(
    "CompletionLogprobs",
    r"""Parallel lists, one entry per token.

The first token of an echoed prompt has no log-probability. `text_offset` is how much of the choice's text was
certain before the token: where its own text begins, unless bytes before it were not yet a character. A token that
is not text by itself is written `bytes:\xNN`, one `\xNN` per byte.""",
    {
        "tokens": [str],
        "token_logprobs": [float | None],
        "top_logprobs": [dict[str, float] | None],
        "text_offset": [int],
    },
)
CompletionChoice = shape(
    "CompletionChoice",
    """One continuation; `index` counts the choices of the first prompt, then those of the second, and so on.

`token_ids` are the generated tokens, there if the call asked for them.""",
    {
        "index": int,
        "text": str,
        "logprobs": CompletionLogprobs | None,
        "finish_reason": Literal["stop", "length", "content_filter"],
        "token_ids": (list[int] | None, Field(None, exclude_if=is_none)),
    },
)
Completion = shape(
    "Completion",
    "The continuations of one call. `system_fingerprint` changes when equal seeds may give other results.",
    {"id": str, "object": fixed("text_completion"), **MADE, "choices": [CompletionChoice], "usage": Usage, **DJINN},
)
CompletionChunkChoice = shape(
    "CompletionChunkChoice",
    "The next piece of one continuation; the last has a `finish_reason`.",
    {
        "index": int,
        "text": str,
        "logprobs": CompletionLogprobs | None,
        "finish_reason": Literal["stop", "length", "content_filter"] | None,
        "token_ids": (list[int] | None, None),
    },
)
CompletionChunk = shape(
    "CompletionChunk",
    "A piece of streamed continuations.",
    {**CHUNK_HEAD, **DJINN, "object": "text_completion", "choices": [CompletionChunkChoice]},
)
CompletionEvent = chunk_event(
    "CompletionEvent",
    "A server-sent event of streamed continuations. `data` is the JSON text of a `CompletionChunk`; after an error,\n"
    "that of an `ErrorBody`; in the last event of a stream without an error `[DONE]`.",
    CompletionChunk | ErrorBody,
)

NUMBERED = {"sequence_number": int}
"""All events have it: they are counted from 0 on."""


def _in_item(component: str, about: str, *types: str, **fields: Any) -> Any:
    """An event about an item, of one of the `types`."""
    kinds: Any = one_of(f"response.{each}" for each in types)
    return shape(component, about, {**NUMBERED, "item_id": str, "output_index": int, "type": kinds, **fields})


_TOKEN_TEXT = {"token": str, "logprob": float}
StreamedTopLogprob = shape("StreamedTopLogprob", "A token that could stand at a position.", _TOKEN_TEXT)
_SCORED: Any = [scored_shape("StreamedLogprob", StreamedTopLogprob, _TOKEN_TEXT)]
_TEXT_OR_THOUGHT: Any = Annotated[OutputTextPart | ThoughtPart, Field(discriminator="type")]
ResponseEvent = streamed_events(
    "ResponseEvent",
    """A server-sent event of a streamed response.

`data` is the JSON text of a `StreamedResponse` of the type `event`.""",
    "StreamedResponse",
    shape(
        "ResponseStatusEvent",
        "The response as it is now. The first two events are of this form, and the last.",
        {
            **NUMBERED,
            "type": Literal[
                "response.created",
                "response.queued",
                "response.in_progress",
                "response.completed",
                "response.incomplete",
                "response.failed",
            ],
            "response": ResponseObject,
        },
    ),
    shape(
        "OutputItemEvent",
        "An item begins, or is done.",
        {
            **NUMBERED,
            "type": Literal["response.output_item.added", "response.output_item.done"],
            "output_index": int,
            "item": OutputItem,
        },
    ),
    _in_item(
        "ContentPartEvent",
        "The text of a message begins, or is done; so do thoughts.",
        "content_part.added",
        "content_part.done",
        content_index=int,
        part=_TEXT_OR_THOUGHT,
    ),
    _in_item(
        "TextDeltaEvent",
        "The next text of a message.",
        "output_text.delta",
        content_index=int,
        delta=str,
        logprobs=_SCORED,
    ),
    _in_item(
        "TextDoneEvent",
        "The whole text of a message.",
        "output_text.done",
        content_index=int,
        text=str,
        logprobs=_SCORED,
    ),
    _in_item(
        "ArgumentsDeltaEvent",
        "The next piece of the JSON text of a call's arguments.",
        "function_call_arguments.delta",
        delta=str,
    ),
    _in_item("ArgumentsDoneEvent", "All arguments of a call.", "function_call_arguments.done", name=str, arguments=str),
    _in_item(
        "CustomInputDeltaEvent",
        "The next text of the input of a custom tool's call.",
        "custom_tool_call_input.delta",
        delta=str,
    ),
    _in_item(
        "CustomInputDoneEvent", "All the input of a custom tool's call.", "custom_tool_call_input.done", input=str
    ),
    _in_item("ThoughtDeltaEvent", "The next thoughts.", "reasoning_text.delta", content_index=int, delta=str),
    _in_item("ThoughtDoneEvent", "The whole thoughts of an item.", "reasoning_text.done", content_index=int, text=str),
    _in_item(
        "SummaryPartEvent",
        "Thoughts begin, or are done, where they are asked for as a summary.",
        "reasoning_summary_part.added",
        "reasoning_summary_part.done",
        summary_index=int,
        part=SummaryPart,
    ),
    _in_item(
        "SummaryDeltaEvent",
        "The next thoughts of a summary.",
        "reasoning_summary_text.delta",
        summary_index=int,
        delta=str,
    ),
    _in_item(
        "SummaryDoneEvent",
        "The whole thoughts of a summary.",
        "reasoning_summary_text.done",
        summary_index=int,
        text=str,
    ),
)
