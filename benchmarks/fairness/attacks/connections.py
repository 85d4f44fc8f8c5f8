"""Attacks by connections that say little, or hear nothing."""

import asyncio
import json
from collections.abc import Awaitable, Callable

from benchmarks.fairness.attacks.base import Attack, Target

HALF_HEADERS, IDLE, UNREAD = 3000, 500, 200
BODY_BYTES = 1_500_000_000
PART = bytes(1 << 20)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _talk(target: Target, talk: Talk) -> None:
    """One connection."""
    url = target.client.base_url
    try:
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 12)
    except OSError as error:
        target.answers[type(error).__name__] += 1
        return
    try:
        await talk(reader, writer)
    except OSError as error:
        target.answers[type(error).__name__] += 1
    finally:
        writer.close()


async def _keep(target: Target, count: int, talk: Talk) -> None:
    """So many connections, each of them made again when the server has ended it."""

    async def repeat() -> None:
        while True:
            await _talk(target, talk)
            await asyncio.sleep(0.1)

    await asyncio.gather(*(repeat() for _ in range(count)))


def _head(target: Target, request: str, *lines: str) -> bytes:
    host = f"{target.client.base_url.host}:{target.client.base_url.port}"
    return "\r\n".join([request, f"Host: {host}", f"Authorization: Bearer {target.key}", *lines, "", ""]).encode()


async def half_headers(target: Target) -> None:
    async def say_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /v1/sessions HTTP/1.1\r\nHost: ")
        await _until_ended(target, reader)

    await _keep(target, HALF_HEADERS, say_half)


async def idle_connections(target: Target) -> None:
    async def ask_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(target, "GET /health HTTP/1.1"))
        await _until_ended(target, reader)

    await _keep(target, IDLE, ask_once)


async def unread_answers(target: Target) -> None:
    tokens = min(800, target.model.context - 32)
    body = {"model": target.model.name, "prompt": target.token_ids(8), "max_tokens": tokens, "stream": True}
    content = json.dumps({**body, "ignore_eos": True, "logprobs": 5}).encode()

    async def ask_and_never_read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = ("Content-Type: application/json", f"Content-Length: {len(content)}")
        writer.write(_head(target, "POST /v1/completions HTTP/1.1", *lines) + content)
        await writer.drain()
        first = await reader.read(16)
        target.answers[first[9:12].decode(errors="replace") or "ended"] += 1
        await asyncio.sleep(3600)

    await _keep(target, UNREAD, ask_and_never_read)


async def get_with_a_body(target: Target) -> None:
    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_head(target, "GET /v1/sessions/import HTTP/1.1", f"Content-Length: {BODY_BYTES}"))
        answer = asyncio.create_task(_until_ended(target, reader))
        try:
            for _ in range(BODY_BYTES // len(PART)):
                writer.write(PART)
                await writer.drain()
        finally:
            answer.cancel()

    await _keep(target, 4, send)


async def _until_ended(target: Target, reader: asyncio.StreamReader) -> None:
    while part := await reader.read(4096):
        if part.startswith(b"HTTP/"):
            target.answers[part[9:12].decode(errors="replace")] += 1
    target.answers["ended"] += 1


ATTACKS = (
    Attack("half-headers", "3,000 connections send half a header", half_headers),
    Attack("idle-connections", "500 connections ask once and stay", idle_connections),
    Attack("unread-answers", "200 connections ask for long streams and read nothing", unread_answers),
    Attack("get-with-body", "4 connections send a GET with a body of 1.5 GB", get_with_a_body),
)
