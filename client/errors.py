"""Every error that the client raises."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from client.job_models import ActivationsJobInfo
from client.models import Turn


class DjinnError(Exception):
    """Base of every error of this package.

    `message` is a sentence; `request_id` is the server's `X-Request-Id`, to be named in a bug report.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class APIError(DjinnError):
    """The server answered with an error.

    `status` is the HTTP status, None when the error came inside an event stream. `type` and `code` are the server's
    words for it, `param` is the field at fault. `retry_after` is in seconds, None unless the server said so. `turn` is
    the answer of a turn that is over all the same (`not_durable`): to ask again would take it twice. A status without a
    class of its own raises this one.
    """

    def __init__(
        self,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.type = type
        self.code = code
        self.param = param
        self.status = status
        self.retry_after = retry_after
        self.turn = turn


class BadRequest(APIError):
    """400: the request cannot be understood, or does not fit in the context. 408: it did not come whole."""


class Unauthorized(APIError):
    """401: no valid API key."""


class Forbidden(APIError):
    """403: the server does not answer to the name in the URL."""


class NotFound(APIError):
    """404: no such session or model, or not yours."""


class Conflict(APIError):
    """409: the session's state does not allow this."""


class Misdirected(APIError):
    """421: the session has moved to another server of the cluster."""


class TooLarge(APIError):
    """413: the body is over the server's limit."""


class Unprocessable(APIError):
    """422: a field is outside its range; `param` names it."""


class RateLimited(APIError):
    """429: the queue is full, as many sessions, files or streams are open as may be, or checkpoints have no room; see
    `retry_after`.
    """


class ServerError(APIError):
    """5xx: a bug, a device failure, a full disk, too many connections, or the server is shutting down."""


class TransportError(DjinnError):
    """There was no whole answer."""


class InvalidRequest(TransportError):
    """HTTP or JSON has no form for what was to be sent, or the client is closed: nothing was sent."""


class ConnectionFailed(TransportError):
    """The request never reached the server: repeating it is safe."""


class ConnectionLost(TransportError):
    """The connection broke after the request was sent: it may have taken effect."""


class StreamBroken(ConnectionLost):
    """The event stream ended before the turn did; the server cancels a turn whose reader is gone."""


class Timeout(TransportError):
    """The server was silent for too long: the request may have taken effect."""


class JobFailed(DjinnError):
    """A job has failed; `info` is what the server says of it, and its `errors` name lines of its file."""

    def __init__(self, info: ActivationsJobInfo) -> None:
        [first, *rest] = info.errors or [None]
        why = "it does not say why" if first is None else first.message
        where = "" if first is None or first.line is None else f" (line {first.line})"
        super().__init__(f"job {info.id} has failed: {why}{where}{f', and {len(rest)} more' if rest else ''}")
        self.info = info


class InvalidAnswer(TransportError):
    """The answer is not Djinn's: another server, a proxy, or another version."""


BY_STATUS: Mapping[int, type[APIError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: BadRequest,
    409: Conflict,
    413: TooLarge,
    415: BadRequest,
    421: Misdirected,
    422: Unprocessable,
    429: RateLimited,
}
BY_CODE: Mapping[str, type[APIError]] = {
    "context_length_exceeded": BadRequest,
    "malformed_request": BadRequest,
    "compressed_body": BadRequest,
    "invalid_api_key": Unauthorized,
    "foreign_host": Forbidden,
    "wrong_role": Forbidden,
    "model_not_found": NotFound,
    "thread_not_found": NotFound,
    "not_found": NotFound,
    "request_timeout": BadRequest,
    "wrong_state": Conflict,
    "adapter_not_loaded": Conflict,
    "upload_not_loaded": Conflict,
    "upload_in_use": Conflict,
    "no_cluster": Conflict,
    "already_there": Conflict,
    "moving": Conflict,
    "name_taken": Conflict,
    "peer_mismatch": Conflict,
    "moved": Misdirected,
    "unknown_replica": Unprocessable,
    "request_too_large": TooLarge,
    "field_out_of_range": Unprocessable,
    "files_full": Unprocessable,
    "beyond_tenant_limit": Unprocessable,
    "bad_export": Unprocessable,
    "bad_adapter": Unprocessable,
    "adapters_full": Unprocessable,
    "uploads_full": Unprocessable,
    "idempotency_key_reused": Unprocessable,
    "deadly_turn": Unprocessable,
    "grammar_too_complex": Unprocessable,
    "queue_full": RateLimited,
    "session_limit": RateLimited,
    "spool_full": RateLimited,
    "logprobs_full": RateLimited,
    "activations_full": RateLimited,
    "stream_limit": RateLimited,
    "tenant_limit": RateLimited,
    "rate_limit_exceeded": RateLimited,
    "draining": ServerError,
    "peer_away": ServerError,
    "peer_full": ServerError,
    "peer_stranger": ServerError,
    "move_unsettled": ServerError,
    "replica_away": ServerError,
    "replica_lost": ServerError,
    "moving_on": ServerError,
    "directory_away": ServerError,
    "connection_limit": ServerError,
    "bodies_full": ServerError,
    "not_durable": ServerError,
    "journal_unavailable": ServerError,
    "fenced": ServerError,
    "disk_full": ServerError,
    "engine_error": ServerError,
    "engine_restarting": ServerError,
    "engine_stalled": ServerError,
    "server_restarted": ServerError,
    "weights_lost": ServerError,
    "internal_error": ServerError,
}
"""What an error inside an event stream is, where there is no status to tell."""


class _Fields(BaseModel):
    """What is under `error`. Servers that imitate OpenAI's body may have a number for `code`."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    message: str
    type: str | None = None
    code: str | None = None
    param: str | None = None


class _Body(BaseModel):
    error: _Fields
    turn: Turn | None = None


def error_from_answer(status: int, headers: Mapping[str, str], body: bytes) -> APIError:
    """The error that an answer with a status outside 200-299 stands for.

    A body that is not an error body (a proxy's page, say) becomes the message, cut to 200 characters.
    """
    kind = BY_STATUS.get(status, ServerError if status >= 500 else APIError)
    try:
        found = _Body.model_validate_json(body)
    except ValidationError:
        found = _Body(error=_Fields(message=f"HTTP {status} {body.decode('utf-8', 'replace')[:200]}".strip()))
    return kind(
        **found.error.model_dump(),
        turn=found.turn,
        status=status,
        request_id=headers.get("x-request-id"),
        retry_after=_seconds(headers.get("retry-after")),
    )


def error_from_event(data: str, *, request_id: str | None) -> DjinnError:
    """The error that an `error` event stands for; its class follows from the `code` it carries."""
    try:
        found = _Body.model_validate_json(data)
    except ValidationError:
        return InvalidAnswer(f"an error event without an error body: {data[:200]}", request_id=request_id)
    kind = BY_CODE.get(found.error.code or "", APIError)
    return kind(**found.error.model_dump(), turn=found.turn, request_id=request_id)


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` in seconds; its other form, a date, reads as absent: Djinn does not use it."""
    if retry_after is None or not retry_after.isdecimal():
        return None
    return float(retry_after)
