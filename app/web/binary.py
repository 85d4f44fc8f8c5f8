"""Bodies that are files: safetensors, as they come in and go out."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from app.web.sse import ClientDisconnected

OCTET_STREAM = "application/octet-stream"
"""The type of files that every client knows."""
SAFETENSORS = "application/vnd.safetensors"
"""The same files under their own name."""
FILE: dict[str, Any] = {OCTET_STREAM: {"schema": {"type": "string", "format": "binary"}}}
"""The documented `content` of such a body."""
FILE_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": FILE}}
"""The `openapi_extra` of a route that takes one."""


def file_type(request: Request) -> str:
    """The media type of an answer that is a safetensors file: its own if `Accept` names that."""
    return SAFETENSORS if SAFETENSORS in accepted_types(request) else OCTET_STREAM


def file_response(request: Request, content: bytes) -> Response:
    """An answer that is a safetensors file."""
    return Response(content, media_type=file_type(request))


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
