"""`/v1/responses` as a WebSocket: one response after the other."""

import asyncio
from contextlib import AsyncExitStack, aclosing, closing
from typing import Any

import orjson
from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError
from starlette.routing import WebSocketRoute

from app.domain.errors import BadRequest, DjinnError, FieldOutOfRange, MalformedRequest
from app.domain.values import MAX_NAME
from app.openai.response_events import Event
from app.openai.response_input import ResponseBody
from app.openai.response_store import UnstoredConversation
from app.routers.dependencies import Services
from app.routers.openai import SESSION_HEADER
from app.routers.response_call import ResponseCall
from app.web.bodies import read_in_turn
from app.web.errors import body_of, describe_body, error_response
from app.wire.extras import IgnoredFields

CREATE = "response.create"


class ResponseConnection:
    """Reads the client's events, and sends those of one response at a time."""

    def __init__(self, websocket: WebSocket, services: Services, call: ResponseCall) -> None:
        self._websocket = websocket
        self._services = services
        self._call = call
        self._running: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Return when the client has gone. A response that is being generated then is cancelled."""
        try:
            while True:
                await self._take(await self._websocket.receive())
        except WebSocketDisconnect:
            pass
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait([self._running])

    async def _take(self, message: Any) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        text = message.get("text")
        try:
            fields = await self._read(text.encode() if text is not None else message.get("bytes") or b"")
        except DjinnError as error:
            await self._send(_error_event(error))
            return
        self._running = asyncio.create_task(self._answer(fields))

    async def _read(self, message: bytes) -> dict[str, Any]:
        """The fields of a `response.create` event. Raises `MalformedRequest` for any other."""
        services, owner = self._services, self._websocket.state.owner
        fields = await read_in_turn(message, services.info.max_model_len, services.side_work, owner)
        if not isinstance(fields, dict) or fields.get("type") != CREATE:
            raise MalformedRequest(f"type: only events of type {CREATE} are taken", param="type")
        if self._running is not None and not self._running.done():
            raise MalformedRequest("a response is being generated: this connection runs one at a time")
        return {name: value for name, value in fields.items() if name != "type"}

    async def _answer(self, fields: dict[str, Any]) -> None:
        ignored = IgnoredFields(strict=self._services.settings.strict_fields)
        try:
            self._websocket.state.admit()  # the key may have ended since the connection began
            async with AsyncExitStack() as cleanup:
                run = await self._call.start(_body(fields), ignored, cleanup)
                self._count(ignored)
                async with aclosing(run.events()) as events:
                    async for event in events:
                        await self._send(_with_ignored(event, ignored))
        except WebSocketDisconnect:
            pass  # the reader of the client's events sees it too
        except Exception as error:
            await self._send(_error_event(error))

    def _count(self, ignored: IgnoredFields) -> None:
        for label in ignored.labels():
            self._services.metrics.ignored_fields.labels(label).inc()

    async def _send(self, event: Event) -> None:
        await self._websocket.send_text(orjson.dumps(event).decode())


def _body(fields: dict[str, Any]) -> ResponseBody:
    """Raises `BadRequest` for invalid fields."""
    try:
        return ResponseBody.model_validate(fields)
    except ValidationError as error:
        raise BadRequest(describe_body(ResponseBody, error)) from error


def _with_ignored(event: Event, ignored: IgnoredFields) -> Event:
    """The first event of a response names the ignored fields: there is no header to do so."""
    return {**event, "ignored_fields": ignored.header} if event["sequence_number"] == 0 and ignored.header else event


def _error_event(error: Exception) -> Event:
    if isinstance(error, FieldOutOfRange):
        error = BadRequest(error)
    known = error if isinstance(error, DjinnError) else None
    status = DjinnError.status if known is None else known.status
    retry_after_s = None if known is None else known.retry_after_s
    headers = {} if retry_after_s is None else {"headers": {"Retry-After": str(retry_after_s)}}
    return {"type": "error", "status": status, "error": orjson.loads(body_of(error))["error"], **headers}


async def connect_responses(websocket: WebSocket) -> None:
    """Serve one connection until the client closes it."""
    websocket.scope["route"] = ROUTE  # as FastAPI does for its own
    services: Services = websocket.app.state.services
    owner: str | None = websocket.state.owner
    try:
        session_name = _session_name(websocket)
        if session_name is not None:
            services.bound_sessions.find(owner, session_name)  # raises where it is, if it is on another server
    except DjinnError as error:
        refusal = BadRequest(error) if isinstance(error, FieldOutOfRange) else error
        await websocket.send_denial_response(error_response(refusal, websocket.scope))
        return
    with closing(UnstoredConversation(services.sessions)) as unstored:
        call = ResponseCall(services, owner, unstored, session_name)
        await websocket.accept()
        await ResponseConnection(websocket, services, call).serve()


def _session_name(websocket: WebSocket) -> str | None:
    """What `X-Session-ID` says. Raises `FieldOutOfRange` for more than one, and for query parameters."""
    for name in websocket.query_params:
        raise FieldOutOfRange(f"{name}: this route takes no query parameters", param=name)
    names = set(websocket.headers.getlist(SESSION_HEADER))
    if len(names) > 1 or not all(1 <= len(name) <= MAX_NAME for name in names):
        message = f"{SESSION_HEADER}: one name of 1 to {MAX_NAME} characters"
        raise FieldOutOfRange(message, param=SESSION_HEADER)
    return next(iter(names), None)


ROUTE = WebSocketRoute("/v1/responses", connect_responses)
"""Not one of FastAPI's: what the application does to every request is for HTTP."""
