"""One turn of a session: only what is new travels in, tokens come out as they are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial

from fastapi import APIRouter, Request, Response

from app.domain import FinishReason, SessionState
from app.error_handlers import body_of
from app.errors import WrongState
from app.generation import TextChunk, TextTurn
from app.messages import TurnFinished
from app.prompts import new_token_ids
from app.routers.dependencies import CleanupDep, Services, ServicesDep, SessionDep, errors
from app.schemas.turns import GenerateBody
from app.session import Session
from app.sse import EventStream, sse_event, unless_disconnected
from app.views.turns import TokenEvent, TokenLogprobsView, TurnUsageView, TurnView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

SSE_RESPONSE = {
    "description": "With `stream`, events `token` (TokenEvent), then `finished` (TurnView) or `error` (ErrorBody)",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


@router.post(
    "/{session_id}/generate",
    operation_id="generate",
    response_model=TurnView,
    responses={**errors(400, 404, 409, 429, 503), 200: SSE_RESPONSE},
)
async def generate(
    request: Request, session: SessionDep, body: GenerateBody, services: ServicesDep, cleanup: CleanupDep
) -> Response:
    """Append to the session's history and generate. A client that disconnects cancels the turn."""
    reader = await _start(session, body, services, cleanup)
    if body.stream:
        return EventStream(_events(reader))
    view = await unless_disconnected(request, reader.read())
    return Response(view.model_dump_json(), media_type="application/json")


class _TurnReader:
    """Reads one turn to its end and keeps all of it."""

    def __init__(self, text_turn: TextTurn, *, with_logprobs: bool) -> None:
        self._text_turn = text_turn
        self._logprobs: list[TokenLogprobsView] | None = [] if with_logprobs else None
        self._text: list[str] = []
        self._token_ids: list[int] = []

    async def __aiter__(self) -> AsyncGenerator[TokenEvent | TurnView, None]:
        async for item in self._text_turn:
            if isinstance(item, TextChunk):
                yield self._take(item)
            elif isinstance(item, TurnFinished):
                yield self._finish(item)

    async def read(self) -> TurnView:
        """The whole turn."""
        *_, whole = [item async for item in self]
        assert isinstance(whole, TurnView)
        return whole

    def _take(self, chunk: TextChunk) -> TokenEvent:
        self._text.append(chunk.text)
        self._token_ids += chunk.token_ids
        logprobs = None
        if self._logprobs is not None:
            logprobs = [TokenLogprobsView.of(found) for found in chunk.logprobs]
            self._logprobs += logprobs
        return TokenEvent(text=chunk.text, token_ids=list(chunk.token_ids), logprobs=logprobs)

    def _finish(self, finished: TurnFinished) -> TurnView:
        return TurnView(
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=finished.reason,
            usage=TurnUsageView.of(finished.usage),
            logprobs=self._logprobs,
        )


async def _start(session: Session, body: GenerateBody, services: Services, cleanup: AsyncExitStack) -> _TurnReader:
    """Queue the turn; `cleanup` ends it if it still runs when the response is over."""
    registry, tokens = services.sessions, services.tokens
    body.check_vocabulary(services.info.vocab_size)
    token_ids = await _encode(session, body, services)
    max_tokens = registry.room(len(session.history) + len(token_ids), body.max_tokens, param=body.input_field)
    stop = body.to_stop_rule(max_tokens=max_tokens, eos_token_ids=tokens.eos_token_ids)
    params = body.to_params(logprobs=body.logprobs)
    turn = registry.start_turn(session, token_ids, params, stop, param=body.input_field)
    cleanup.callback(registry.release, session, turn)
    on_stop = partial(registry.cancel, session, turn, reason=FinishReason.STOP)
    settled = partial(registry.settled, session)
    text_turn = TextTurn(turn, tokens.stream(after_text=True), body.stop_strings, on_stop, settled, body.min_tokens)
    return _TurnReader(text_turn, with_logprobs=body.logprobs is not None)


async def _encode(session: Session, body: GenerateBody, services: Services) -> list[int]:
    """The turn's new tokens. Raises `WrongState` if the history that they were made to follow is not the one now."""
    session.require(SessionState.IDLE, to="start a turn")
    turn, history = session.turn, session.history[:]
    token_ids = await asyncio.to_thread(new_token_ids, body, services.tokens, history, services.info.vocab_size)
    session.require(SessionState.IDLE, to="start a turn")
    if session.turn is not turn or len(session.history) != len(history):
        raise WrongState(f"cannot start a turn: the history of session {session.id} has changed meanwhile")
    return token_ids


async def _events(reader: _TurnReader) -> AsyncGenerator[bytes, None]:
    try:
        async for item in reader:
            name = "token" if isinstance(item, TokenEvent) else "finished"
            yield sse_event(name, item.model_dump_json().encode())
    except Exception as error:
        yield sse_event("error", body_of(error))
