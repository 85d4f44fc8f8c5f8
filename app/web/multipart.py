"""A form with files, `multipart/form-data` (RFC 7578), read as it comes: no part of it is in memory as a whole."""

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from enum import Enum, auto

from app.domain.errors import FieldOutOfRange, MalformedRequest, TooLarge

MAX_PART_HEADER = 8192
MAX_BOUNDARY = 70
"""RFC 2046, 5.1.1."""
MAX_PARTS = 64
MAX_FORM_BYTES = 1 << 16
"""Of a form, beside its file."""


@dataclass(frozen=True, slots=True)
class FormPart:
    """A field of the form; its content follows. `filename` is None unless the field is a file."""

    name: str
    filename: str | None


class _Place(Enum):
    """Where in the body the next byte is."""

    CONTENT = auto()
    BEHIND_BOUNDARY = auto()
    HEADER = auto()
    END = auto()


async def form_parts(content_type: str, chunks: AsyncIterable[bytes]) -> AsyncGenerator[FormPart | bytes, None]:
    """Each part of the form, followed by its content in pieces. Raises `MalformedRequest`, and what `chunks` raise."""
    delimiter = b"\r\n--" + _boundary(content_type)
    place, pending, count = _Place.CONTENT, bytearray(b"\r\n"), 0  # the first boundary may have no line before it
    async for chunk in chunks:
        if place is _Place.END:
            continue
        pending += chunk
        while True:
            if place is _Place.CONTENT:
                end = pending.find(delimiter)
                ready = len(pending) - len(delimiter) + 1 if end < 0 else end
                if ready > 0 and count:  # what stands before the first boundary is for readers without MIME
                    yield bytes(pending[:ready])
                if end < 0:
                    del pending[: max(0, ready)]
                    break
                del pending[: end + len(delimiter)]
                place = _Place.BEHIND_BOUNDARY
            elif place is _Place.BEHIND_BOUNDARY:
                if len(pending) < 2:
                    break
                if pending.startswith(b"--"):
                    place = _Place.END
                    break
                if not pending.startswith(b"\r\n"):
                    raise MalformedRequest("the form has something behind a boundary", param="body")
                place = _Place.HEADER
            elif place is _Place.HEADER:
                end = pending.find(b"\r\n\r\n")
                if (len(pending) if end < 0 else end) > MAX_PART_HEADER or count == MAX_PARTS:
                    raise MalformedRequest(
                        f"the form has a header over {MAX_PART_HEADER} bytes, or over {MAX_PARTS} parts", param="body"
                    )
                if end < 0:
                    break
                count += 1
                yield _part(pending[:end])
                del pending[: end + 4]
                place = _Place.CONTENT
    if place is not _Place.END:
        raise MalformedRequest("the form ends before its last boundary", param="body")


async def read_form(
    content_type: str,
    chunks: AsyncIterable[bytes],
    file: str,
    write: Callable[[bytes], Awaitable[object]],
    *,
    most: int,
) -> tuple[FormPart, dict[str, bytes]]:
    """The part named `file` of a form, whose content goes to `write` as it comes, and all other fields by name.

    Raises `FieldOutOfRange` where the file is missing or a part is there twice, `TooLarge` for a field of more than
    `most` bytes, and what `form_parts` and `write` raise.
    """
    fields, found, part = dict[str, bytes](), None, None
    async with aclosing(form_parts(content_type, chunks)) as pieces:
        async for piece in pieces:
            if isinstance(piece, FormPart):
                part, name = piece, piece.name[:100]
                if part.name in fields or (part.name == file and found is not None):
                    raise FieldOutOfRange(f"{name}: it is given twice", param=name)
                if part.name == file:
                    found = part
                else:
                    fields[part.name] = b""
            elif part is found:
                await write(piece)
            elif part is not None:
                fields[part.name] += piece
                if len(fields[part.name]) > most:
                    raise TooLarge(f"{part.name[:100]}: at most {most} bytes")
    if found is None:
        raise FieldOutOfRange(f"{file}: required, a file", param=file)
    return found, fields


def _boundary(content_type: str) -> bytes:
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary("")
    if message.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY:
        raise MalformedRequest("the body must be a form, sent with Content-Type: multipart/form-data", param="body")
    return boundary.encode("latin-1", "replace")


def _part(header: bytes | bytearray) -> FormPart:
    """The part that a header begins. Browsers and SDKs write names in UTF-8."""
    message = message_from_string(header.decode("utf-8", "replace").strip())
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise MalformedRequest("a part of the form has no name", param="body")
    return FormPart(name, message.get_filename())
