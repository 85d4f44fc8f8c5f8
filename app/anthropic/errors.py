"""The error body of Anthropic's API, as it is documented; `app.web.errors.bodies` writes it."""

from typing import Literal

from pydantic import BaseModel


class MessagesErrorDetail(BaseModel):
    """What went wrong; the message names the field at fault."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every error answer on these routes, and the data of an `error` event."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None
