"""One WebSocket of `/v1/responses`."""

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any

import orjson
from fastapi import WebSocket, WebSocketDisconnect
from pydantic import ValidationError

from app.domain.errors import BadRequest, DjinnError, FieldOutOfRange, MalformedRequest
from app.openai.responses.body import ResponseBody
from app.openai.responses.output import Event
from app.routers.dependencies import Services
from app.routers.openai.response_call import ResponseCall
from app.web.errors.bodies import body_of
from app.web.errors.validation import describe_body
from app.web.json_body import read_in_turn
from app.wire.extras.ignored_fields import IgnoredFields

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
