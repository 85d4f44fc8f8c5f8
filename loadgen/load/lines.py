"""Files with one JSON object a line. What is wrong in one is a sentence that names the line and the field."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from loadgen.errors import LoadgenError

T = TypeVar("T")


def read_lines(path: Path, what: str) -> list[tuple[str, bytes]]:
    """The lines of a file that are not empty, each behind the words for where it is: `what` it is a line of, and its
    number. Raises `LoadgenError` if the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LoadgenError(f"cannot read {what} {path}: {error.strerror}") from error
    return [(f"{what} {path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def parse_line(kind: type[T] | TypeAdapter[T], where: str, line: bytes, form: str) -> T:
    """A line as that kind; `form` says what it should have been. Raises `LoadgenError`."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] == "json_invalid":
            raise LoadgenError(f"{where}: the line: invalid JSON; {form}") from error
        raise LoadgenError(f"{where}: {'.'.join(map(str, problem['loc'])) or 'the line'}: {problem['msg']}") from error
