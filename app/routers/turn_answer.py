"""How one stretch of a turn is answered, up to its end or its next pause: whole, or as server-sent events."""

from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import Request, Response

from app.domain.errors import NotDurable
from app.messages import Paused, TurnFinished
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.text.generation import TextChunk, TurnReader
from app.web.errors.bodies import body_of
from app.web.openapi.document import component
from app.web.sse import EventStream, sse_event, unless_disconnected
from app.wire.checkpoint import CheckpointView
from app.wire.events import TurnErrorBody, TurnEvent
from app.wire.logprobs import json_with_logprobs
from app.wire.turns import TokenEvent, TurnView

TURN_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The turn; with `stream`, `token` events, then one event `finished`, `paused` or `error`.",
        "content": {EventStream.media_type: {"schema": component(TurnEvent)}},
    },
    500: {"model": TurnErrorBody},
}
"""The documented answers of a route that answers with a turn, where they are not those of every route. Its model is
`TurnView`.
"""


async def answer_turn(
    request: Request, session: Session, reader: TurnReader, *, stream: bool, keyed: KeyedRequest | None = None
) -> Response:
    """Read the next stretch of the session's turn, which `keyed` has asked for. Raises `ClientDisconnected` if the
    client has gone, and `NotDurable` with the turn in it.
    """
    if stream:
        return EventStream(turn_events(session, reader, keyed))
    try:
        end = await unless_disconnected(request, reader.read())
    except NotDurable as error:
        raise await _with_turn(error, session, reader) from error
    answer = (await _turn(session, reader, end))[1]
    if keyed is not None:
        keyed.is_answered = True
    return Response(answer, media_type="application/json")


async def turn_events(
    session: Session, reader: TurnReader, keyed: KeyedRequest | None = None
) -> AsyncGenerator[bytes, None]:
    """The events of the next stretch. An error is an event too: the status has been sent."""
    try:
        async for item in reader:
            if isinstance(item, TextChunk):
                event = TokenEvent(text=item.text, token_ids=list(item.token_ids))
                found = None if reader.logprobs is None else item.logprobs
                yield sse_event("token", await json_with_logprobs(event, found))
            elif isinstance(item, Paused | TurnFinished):
                event_of_end = sse_event(*await _turn(session, reader, item))
                if keyed is not None:
                    keyed.is_answered = True
                yield event_of_end
    except NotDurable as error:
        yield sse_event("error", body_of(await _with_turn(error, session, reader)))
    except Exception as error:
        yield sse_event("error", body_of(error))


async def _with_turn(error: NotDurable, session: Session, reader: TurnReader) -> NotDurable:
    """The error with the turn's answer: the session has it, so the client must not ask for it again."""
    if reader.finished is None:
        return error
    _, turn = await _turn(session, reader, reader.finished)
    return NotDurable(error.reason, done="the turn is done, but a restart would undo it", turn=orjson.loads(turn))


async def _turn(session: Session, reader: TurnReader, end: Paused | TurnFinished) -> tuple[str, bytes]:
    """The turn's status, and the JSON of its `TurnView`."""
    paused, finished = (end, None) if isinstance(end, Paused) else (None, end)
    view = TurnView(
        status="paused" if paused else "finished",
        text=reader.text,
        token_ids=reader.token_ids,
        finish_reason=finished and finished.reason,
        usage=end.usage,
        checkpoint=paused and CheckpointView.of(paused.checkpoint, _expires_at(session, paused)),
    )
    found = None if reader.logprobs is None else tuple(reader.logprobs)
    return view.status, await json_with_logprobs(view, found, reader.written)


def _expires_at(session: Session, paused: Paused) -> float | None:
    """When the pause ends by itself; None if it is over already."""
    pause = session.pause
    return None if pause is None or pause.info is not paused.checkpoint else pause.expires_at
