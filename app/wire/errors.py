"""The error body."""

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong: `code` is for programs, `message` for people; `param` names the field at fault."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(BaseModel):
    """The body of every error answer, and the data of an `error` event."""

    error: ErrorDetail
