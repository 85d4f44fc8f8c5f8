"""Bodies that are files: safetensors, as they come in and go out."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from app.web.sse import ClientDisconnected

SAFETENSORS = "application/vnd.safetensors"
FILE: dict[str, Any] = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
"""The documented `content` of such a body."""
FILE_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": FILE}}
"""The `openapi_extra` of a route that takes one."""


def file_response(content: bytes) -> Response:
    """An answer that is a safetensors file."""
    return Response(content, media_type=SAFETENSORS)


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
