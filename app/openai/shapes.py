"""What clients read of chats, continuations and streamed responses: the API's document shows it."""

from typing import Annotated, Literal

from pydantic import Field

from app.openai.response import ResponseObject
from app.openai.response_items import OutputItem, OutputTextPart, SummaryPart, ThoughtPart
from app.wire.base import ErrorBody, chunk_event, event_of, fixed, is_none, list_of, shape, union_of
from app.wire.readings import DJINN
from app.wire.sessions import Metadata

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
ChatTokenLogprob = shape(
    "ChatTokenLogprob",
    "The token that stands at a position, and the most likely ones there, best first.",
    {**_TOKEN, "top_logprobs": [TokenAlternative]},
)
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
IN_ITEM = {**NUMBERED, "item_id": str, "output_index": int}
ResponseStatusEvent = shape(
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
)
OutputItemEvent = shape(
    "OutputItemEvent",
    "An item begins, or is done.",
    {
        **NUMBERED,
        "type": Literal["response.output_item.added", "response.output_item.done"],
        "output_index": int,
        "item": OutputItem,
    },
)
ContentPartEvent = shape(
    "ContentPartEvent",
    "The text of a message begins, or is done; so do thoughts.",
    {
        **IN_ITEM,
        "type": Literal["response.content_part.added", "response.content_part.done"],
        "content_index": int,
        "part": Annotated[OutputTextPart | ThoughtPart, Field(discriminator="type")],
    },
)
ThoughtDeltaEvent = shape(
    "ThoughtDeltaEvent",
    "The next thoughts.",
    {**IN_ITEM, "type": "response.reasoning_text.delta", "content_index": int, "delta": str},
)
ThoughtDoneEvent = shape(
    "ThoughtDoneEvent",
    "The whole thoughts of an item.",
    {**IN_ITEM, "type": "response.reasoning_text.done", "content_index": int, "text": str},
)
SummaryPartEvent = shape(
    "SummaryPartEvent",
    "Thoughts begin, or are done, where they are asked for as a summary.",
    {
        **IN_ITEM,
        "type": Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"],
        "summary_index": int,
        "part": SummaryPart,
    },
)
SummaryDeltaEvent = shape(
    "SummaryDeltaEvent",
    "The next thoughts of a summary.",
    {**IN_ITEM, "type": "response.reasoning_summary_text.delta", "summary_index": int, "delta": str},
)
SummaryDoneEvent = shape(
    "SummaryDoneEvent",
    "The whole thoughts of a summary.",
    {**IN_ITEM, "type": "response.reasoning_summary_text.done", "summary_index": int, "text": str},
)
StreamedTopLogprob = shape(
    "StreamedTopLogprob", "A token that could stand at a position.", {"token": str, "logprob": float}
)
StreamedLogprob = shape(
    "StreamedLogprob",
    "The token that stands at a position, and the most likely ones there, best first.",
    {"token": str, "logprob": float, "top_logprobs": [StreamedTopLogprob]},
)
TextDeltaEvent = shape(
    "TextDeltaEvent",
    "The next text of a message.",
    {
        **IN_ITEM,
        "type": "response.output_text.delta",
        "content_index": int,
        "delta": str,
        "logprobs": [StreamedLogprob],
    },
)
TextDoneEvent = shape(
    "TextDoneEvent",
    "The whole text of a message.",
    {**IN_ITEM, "type": "response.output_text.done", "content_index": int, "text": str, "logprobs": [StreamedLogprob]},
)
ArgumentsDeltaEvent = shape(
    "ArgumentsDeltaEvent",
    "The next piece of the JSON text of a call's arguments.",
    {**IN_ITEM, "type": "response.function_call_arguments.delta", "delta": str},
)
ArgumentsDoneEvent = shape(
    "ArgumentsDoneEvent",
    "All arguments of a call.",
    {**IN_ITEM, "type": "response.function_call_arguments.done", "name": str, "arguments": str},
)
CustomInputDeltaEvent = shape(
    "CustomInputDeltaEvent",
    "The next text of the input of a custom tool's call.",
    {**IN_ITEM, "type": "response.custom_tool_call_input.delta", "delta": str},
)
CustomInputDoneEvent = shape(
    "CustomInputDoneEvent",
    "All the input of a custom tool's call.",
    {**IN_ITEM, "type": "response.custom_tool_call_input.done", "input": str},
)
StreamedResponse = union_of(
    "StreamedResponse",
    "type",
    ResponseStatusEvent,
    OutputItemEvent,
    ContentPartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    CustomInputDeltaEvent,
    CustomInputDoneEvent,
    ThoughtDeltaEvent,
    ThoughtDoneEvent,
    SummaryPartEvent,
    SummaryDeltaEvent,
    SummaryDoneEvent,
)
ResponseEvent = event_of(
    "ResponseEvent",
    """A server-sent event of a streamed response.

`data` is the JSON text of a `StreamedResponse` of the type `event`.""",
    StreamedResponse,
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
)
