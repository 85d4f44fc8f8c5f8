"""What every OpenAI route has in common: 400 for invalid input, and a header that names ignored fields."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError

from app.domain.errors import BadRequest, DjinnError, FieldOutOfRange
from app.routers.dependencies import Services, errors
from app.web.errors.validation import describe_validation
from app.web.json_body import JsonRoute
from app.wire.extras.ignored_fields import IgnoredFields

IGNORED_HEADER = "X-Djinn-Ignored"
IGNORED_DESCRIPTION: dict[str, Any] = {
    IGNORED_HEADER: {
        "description": "paths of the fields without effect, separated by commas",
        "schema": {"type": "string"},
    }
}
"""The documented headers of an answer that names ignored fields."""


class OpenAIRoute(JsonRoute):
    """A route that answers 400 where the others answer 422, and names the fields that it ignored."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler between the account of ignored fields and the header made of it."""
        handle = super().get_route_handler()

        async def handle_openai(request: Request) -> Response:
            services: Services = request.app.state.services
            ignored = IgnoredFields(strict=services.settings.strict_fields)
            request.state.ignored_fields = ignored
            try:
                response = await handle(request)
            except RequestValidationError as error:
                raise _as_bad_request(describe_validation(request, error)) from error
            except DjinnError as error:
                raise _as_bad_request(error) from error
            if ignored.header:
                response.headers[IGNORED_HEADER] = ignored.header
            for label in ignored.labels():
                services.metrics.ignored_fields.labels(label).inc()
            return response

        return handle_openai


async def _ignored_fields(request: Request) -> IgnoredFields:
    ignored: IgnoredFields = request.state.ignored_fields
    return ignored


IgnoredDep = Annotated[IgnoredFields, Depends(_ignored_fields)]
"""The account of the call's ignored fields, which its answer names. A route gives it the body first of all."""


def openai_errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can fail with `statuses` beside those that every OpenAI route can fail with."""
    return {status: answer for status, answer in errors(400, *statuses).items() if status != FieldOutOfRange.status}


def _as_bad_request(error: DjinnError) -> DjinnError:
    return BadRequest(error) if error.status == FieldOutOfRange.status else error
