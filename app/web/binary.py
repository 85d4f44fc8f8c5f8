"""Bodies that are files: safetensors, as they come in and go out."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from app.web.sse import ClientDisconnected

OCTET_STREAM = "application/octet-stream"
"""The type of files that every client knows."""
SAFETENSORS = "application/vnd.safetensors"
"""The same files under their own name."""
PART_BYTES = 1 << 20
FILE: dict[str, Any] = {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}
"""The documented `content` of such a body."""
FILE_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": FILE}}
"""The `openapi_extra` of a route that takes one."""


def file_type(request: Request) -> str:
    """The media type of an answer that is a safetensors file: its own if `Accept` names that."""
    return SAFETENSORS if SAFETENSORS in accepted_types(request) else OCTET_STREAM


class LargeAnswer(Response):
    """Sends its body in parts, each once the client has read most of those before. So it is over when little is left in
    memory, or when the connection is gone.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = memoryview(self.body)
        for first in range(0, len(content), PART_BYTES):
            part = bytes(content[first : first + PART_BYTES])
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def file_response(request: Request, content: bytes) -> Response:
    """An answer that is a safetensors file."""
    return LargeAnswer(content, media_type=file_type(request))


def accepted_types(request: Request) -> set[str]:
    """The media types that `Accept` names, in lower case."""
    accepted = ",".join(request.headers.getlist("accept"))
    return {part.partition(";")[0].strip().lower() for part in accepted.split(",")}


async def body_chunks(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises `ClientDisconnected` if it does not come whole."""
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect as error:
        raise ClientDisconnected from error


async def whole_body(request: Request) -> bytes:
    """The body, which is in memory at once. Raises `ClientDisconnected` if it does not come whole."""
    return b"".join([chunk async for chunk in body_chunks(request)])
