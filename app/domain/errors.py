"""Every error a client can see, and the one table from exception to HTTP answer.

DjinnError
├── MalformedRequest      400  the request cannot be understood
│   ├── ContextTooLong    400  more tokens than the model or the pool can hold
│   └── CompressedBody    415  the body is compressed
├── Unauthenticated       401  no valid API key
├── NotFound              404  not there, or not yours
│   └── UnknownModel      404  no such model here
├── MethodNotAllowed      405  the path exists, but not for this method
├── WrongState            409  the session's state does not allow this
├── TooLarge              413  the body is over the size limit
├── FieldOutOfRange       422  one field has a value outside its range, or names a feature that is not there
│   └── BadExport         422  an exported session that is damaged, or not of this model
├── Busy                  429  the queue is full; carries Retry-After
│   └── SessionLimit      429  as many sessions are open as may be
├── Draining              503  the server is shutting down
├── NotDurable            500  done, but not written down: it would not survive a restart
└── EngineError           500  a bug or a device failure
    └── WeightsLost       500  weights that are streamed cannot be read any more, or are not what was stored
"""

from typing import ClassVar


class DjinnError(Exception):
    """Base of every error that reaches a client. `message` is a sentence; `param` names the field at fault."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body of every error answer: `{"error": {message, type, code, param}}`, as the OpenAI API has it."""
        return {"error": {"message": self.message, "type": self.type, "code": self.code, "param": self.param}}


class MalformedRequest(DjinnError):
    status = 400
    type = "invalid_request_error"
    code = "malformed_request"


class ContextTooLong(MalformedRequest):
    code = "context_length_exceeded"


class CompressedBody(MalformedRequest):
    status = 415
    code = "compressed_body"


class Unauthenticated(DjinnError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(DjinnError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class UnknownModel(NotFound):
    code = "model_not_found"


class MethodNotAllowed(DjinnError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class WrongState(DjinnError):
    status = 409
    type = "invalid_request_error"
    code = "wrong_state"


class TooLarge(DjinnError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class FieldOutOfRange(DjinnError):
    status = 422
    type = "invalid_request_error"
    code = "field_out_of_range"


class BadExport(FieldOutOfRange):
    code = "bad_export"


class Busy(DjinnError):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class SessionLimit(Busy):
    code = "session_limit"

    def __init__(self, limit: int, *, retry_after_s: int) -> None:
        super().__init__(
            f"{limit} sessions are open, and no more may be: close some, or create them with ttl_s so that they close "
            "by themselves",
            retry_after_s=retry_after_s,
        )


class Draining(DjinnError):
    status = 503
    type = "server_error"
    code = "draining"


class NotDurable(DjinnError):
    code = "not_durable"


class EngineError(DjinnError):
    code = "engine_error"


class WeightsLost(EngineError):
    code = "weights_lost"
