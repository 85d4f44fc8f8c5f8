"""The answers of `/v1/messages`, streamed and whole."""

from collections.abc import AsyncGenerator, AsyncIterator

import orjson

from app.anthropic.answers import MessageAnswer, whole_message
from app.anthropic.events import MessageWriter
from app.text.generation import TextItem
from app.web.errors.bodies import messages_error_body, visible_error
from app.web.sse import sse_event

Items = AsyncIterator[tuple[int, TextItem]]
"""The items of the call's only choice, each with that choice's index."""


async def stream(items: Items, writer: MessageWriter, request_id: str) -> AsyncGenerator[bytes, None]:
    """The server-sent events of a streamed answer. An error after the stream has begun is an event too, the last."""
    try:
        async for _, item in items:
            for event in writer.events(item):
                yield sse_event(event["type"], orjson.dumps(event))
    except Exception as error:
        yield sse_event("error", messages_error_body(visible_error(error), request_id))


async def collect(items: Items, writer: MessageWriter) -> MessageAnswer:
    """The whole answer."""
    return whole_message([event async for _, item in items for event in writer.events(item)])
