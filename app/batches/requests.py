"""`/v1/batches`: what is asked of a batch, what it looks like, and the check of its lines."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import orjson
from pydantic import AfterValidator, BaseModel, Field

from app.batches.files import ExpiresAfter
from app.domain.errors import DjinnError
from app.web.bodies import read_json
from app.web.errors import clean
from app.wire.base import QueryModel, page_shape
from app.wire.calls import OpenBody
from app.wire.sessions import Metadata

MAX_LINES = 50_000
MAX_PROBLEMS = 20
"""Of a file, that are told: then it is not read any further."""
WINDOW_S = 24 * 3600
DIGEST_BYTES = 16
MAX_CUSTOM_ID = 512
NAP_LINES, NAP_S = 64, 0.002
"""While a file is checked, every so many lines, others have the interpreter for so long."""

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class BatchBody(OpenBody):
    """A file of requests to do."""

    input_file_id: str = Field(max_length=256, description="a file with the purpose batch: one request a line")
    endpoint: Endpoint = Field(description="the path that each line's url names")
    completion_window: Literal["24h"] = Field(description="what has not begun by then is not done any more")
    metadata: Metadata | None = Field(None, description="the caller's own labels, which the batch returns")
    output_expires_after: ExpiresAfter | None = Field(None, description="when the files of results go by themselves")


Shown = Annotated[str, AfterValidator(clean)]
"""What may have a client's own text in it."""


class BatchProblem(BaseModel):
    """Why the file was refused. `line` counts from 1."""

    code: str
    line: int | None = None
    message: Shown
    param: Shown | None = None


class BatchProblems(BaseModel):
    """The first problems of a file."""

    object: Literal["list"] = "list"
    data: list[BatchProblem]


class BatchCounts(BaseModel):
    """Requests of the file, and those that are done: with an answer, or with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(BaseModel):
    """A batch as it is now. Times are in Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None = None
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = BatchCounts()
    metadata: dict[str, str] | None = None


BatchList = page_shape("BatchList", "Batches of the caller, the newest first, and whether there are more.", Batch)


class BatchesQuery(QueryModel):
    """Which batches to list."""

    limit: int = Field(20, ge=0, le=100)
    after: str = Field("", max_length=256, description="id of the batch after which the page begins")


class LineProblem(Exception):
    """A line that is no request of the batch."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def read_line(line: bytes, endpoint: str, models: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The `custom_id` of a line, and the body of its request for one of `models`. Raises `LineProblem`."""
    try:
        request = read_json(line, 0)
    except DjinnError as error:
        raise LineProblem("invalid_json_line", f"This line is not parseable as valid JSON: {error.message}") from error
    if not isinstance(request, dict):
        raise LineProblem("invalid_json_line", "This line is no JSON object.")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(request.get(name), kind) or not request[name]:
            what = "an object" if kind is dict else "a text"
            raise LineProblem("missing_required_parameter", f"{name}: required, and must be {what}.", name)
    if len(request["custom_id"]) > MAX_CUSTOM_ID or not request["custom_id"].isprintable():
        raise LineProblem("invalid_request", f"custom_id: at most {MAX_CUSTOM_ID} printable characters.", "custom_id")
    if request["method"] != "POST":
        raise LineProblem("invalid_method", "method must be POST.", "method")
    if request["url"] != endpoint:
        raise LineProblem("url_mismatch", f"url must be {endpoint}, the endpoint of the batch.", "url")
    body = request["body"]
    if body.get("model") not in models:
        served = " or ".join(map(repr, models))
        raise LineProblem("model_not_found", f"The model of a line must be {served}, which is served here.", "model")
    if body.get("stream") or body.get("background"):
        raise LineProblem("invalid_request", "stream and background must be false in a batch.", "body")
    if endpoint == "/v1/responses":
        body.setdefault("store", False)  # each would keep a session
    return request["custom_id"], body


def next_request(opened: BinaryIO, endpoint: str, models: Sequence[str]) -> tuple[str, bytes] | None:
    """The `custom_id` of the next line, and the body of its request as JSON; None at the end of the file. Raises
    `LineProblem`.
    """
    line = next(filter(bytes.strip, opened), None)
    if line is None:
        return None
    custom_id, body = read_line(line, endpoint, models)
    return custom_id, json.dumps(body).encode()


def check_file(path: Path, endpoint: str, models: Sequence[str], max_line_bytes: int) -> tuple[int, list[BatchProblem]]:
    """How many requests the file of a batch has, and its first problems."""
    seen = set[bytes]()

    def check(line: bytes) -> None:
        custom_id, _ = read_line(line, endpoint, models)
        known = digest_of(custom_id)
        if known in seen:
            raise LineProblem("duplicate_custom_id", f"{custom_id[:100]!r} is there twice.", "custom_id")
        seen.add(known)

    too_many = BatchProblem(code="too_many_tasks", message=f"A batch has at most {MAX_LINES:,} requests.")
    return check_lines(path, check, MAX_LINES, too_many, max_line_bytes, what="requests")


def check_lines(
    path: Path,
    check: Callable[[bytes], None],
    most: int,
    too_many: BatchProblem,
    max_line_bytes: int,
    *,
    what: str,
) -> tuple[int, list[BatchProblem]]:
    """How many lines of a file are right, and its first problems. `check` raises `LineProblem` for a line that is not;
    `too_many` is the problem of a file with more than `most`.
    """
    problems, count = list[BatchProblem](), 0
    with path.open("rb") as opened:
        for number, line in enumerate(iter(partial(opened.readline, max_line_bytes + 1), b""), 1):
            if number % NAP_LINES == 0:
                time.sleep(NAP_S)
            if len(line) > max_line_bytes:
                message = f"A line must be at most {max_line_bytes} bytes."
                problems.append(BatchProblem(code="line_too_long", line=number, message=message))
                break
            if not line.strip():
                continue
            try:
                check(line)
                count += 1
            except LineProblem as problem:
                found = BatchProblem(code=problem.code, line=number, message=problem.message, param=problem.param)
                problems.append(found)
            if count > most:
                problems.append(too_many)
            if len(problems) >= MAX_PROBLEMS or count > most:
                break
    if not (count or problems):
        problems.append(BatchProblem(code="empty_file", message=f"The file has no {what}."))
    return count, problems


def digest_of(custom_id: str) -> bytes:
    """Stands for a `custom_id`, which may be long: a file has many."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def take_up_results(path: Path) -> dict[bytes, bool]:
    """The digests of all requests that a file of results has an entry for, one a line, and whether each was made. Cuts
    off a last line that a crash has left half.
    """
    found = dict[bytes, bool]()
    if not path.exists():
        return found
    with path.open("r+b") as opened:
        end = 0
        for line in opened:
            if not line.endswith(b"\n"):
                opened.truncate(end)
                break
            end += len(line)
            entry = orjson.loads(line)
            found[digest_of(entry["custom_id"])] = entry["response"] is not None
    return found
