"""What the routes of the OpenAI surface share: the call, its session, its refusals."""

from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel

from app.domain.errors import BadRequest, DjinnError, FieldOutOfRange, UnknownModel
from app.domain.values import MAX_NAME, Grammar
from app.engine_process.turn import Turn
from app.openai.choices import Choices, OpenSession
from app.routers.dependencies import CleanupDep, KeyedDep, OwnerDep, Services, ServicesDep, errors
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.sessions.table import holding
from app.sessions.turns import TurnRequest
from app.settings import Settings
from app.web.bodies import JsonRoute
from app.web.errors import describe_validation
from app.web.openapi import component
from app.web.sse import EventStream
from app.wire.extras import IgnoredFields
from app.wire.turns import SamplingFields

SESSION_HEADER = "X-Session-ID"
SessionHeader = Annotated[
    str | None,
    Header(
        alias=SESSION_HEADER,
        min_length=1,
        max_length=MAX_NAME,
        description="binds the call to a session: a session id, or any name, whose first use opens a session",
    ),
]


async def _session_name(request: Request, session_name: SessionHeader = None) -> str | None:
    if len(set(request.headers.getlist(SESSION_HEADER))) > 1:
        raise FieldOutOfRange(f"{SESSION_HEADER}: a call is bound to one session", param=SESSION_HEADER)
    return session_name


SessionNameDep = Annotated[str | None, Depends(_session_name)]
"""What `X-Session-ID` says."""


def bound_session(
    services: Services,
    owner: str | None,
    name: str | None,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    user: str | None,
    undo: ExitStack,
) -> Session | None:
    """The session that a call of `owner` is bound to, by the `name` in its header or by its history; None: it is not.

    A name's first use opens a session, with `user` as metadata; `undo` drops it if the call cannot start.
    Raises `FieldOutOfRange` for several prompts, or `n` choices.
    """
    bound_sessions = services.bound_sessions
    if name is None and not (services.settings.bind_by_prefix and n == len(prompts) == 1):
        return None
    if n > 1:
        raise FieldOutOfRange(f"n must be 1 with {SESSION_HEADER}: a session has one history", param="n")
    if len(prompts) > 1:
        raise FieldOutOfRange(f"prompt must be one prompt with {SESSION_HEADER}", param="prompt")
    found = bound_sessions.find_continued(owner, prompts[0]) if name is None else bound_sessions.find(owner, name)
    if found is not None:
        return found
    if name is None:
        session = bound_sessions.open_unnamed(owner, metadata=labels(user))
    else:
        session = bound_sessions.open(owner, name, metadata=labels(user))
    undo.callback(services.sessions.drop, session)
    return session


def labels(user: str | None) -> dict[str, str]:
    """The metadata of a session that the call opens; one that it finds keeps its own."""
    return {} if user is None else {"user": user}


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


class OpenAICall:
    """One call: who makes it, and the session that it is bound to, if any."""

    def __init__(
        self,
        services: Services,
        owner: str | None,
        cleanup: AsyncExitStack,
        session_name: str | None,
        keyed: KeyedRequest | None,
    ) -> None:
        """`cleanup` is unwound when the response is over; `session_name` is what `X-Session-ID` says, and `keyed` what
        `Idempotency-Key` does.
        """
        self.services = services
        self.owner = owner
        self._cleanup = cleanup
        self._session_name = session_name
        self._keyed = keyed
        self._session: Session | None = None
        self._turn: Turn | None = None

    async def start(
        self,
        body: SamplingFields,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        user: str | None = None,
        prompt_field: str,
        max_tokens: int | None,
        logprobs: int | None,
        limit_field: str = "max_tokens",
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> Choices:
        """Submit the prompts' turns; they end and their sessions close when the response is over.

        `n` choices are made for each prompt; `user` is metadata of a session that the call opens. `grammar` takes the
        place of the body's own; `shown` are special tokens that are part of the text.

        Raises `FieldOutOfRange`, `ContextTooLong` (`prompt_field` names the prompts' field, `limit_field` that of
        `max_tokens`), `WrongState` if the bound session is in use, `Moved` if it is on another server, `Busy` and
        `Draining`.
        """
        registry = self.services.sessions
        body.check_vocabulary(self.services.info.vocab_size)
        _check_count(self.services.settings, prompts=len(prompts), n=n)
        rooms = self._rooms(prompts, max_tokens, prompt_field, limit_field)
        defaults = self.services.sampling
        sampling = body.to_params(defaults, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        sampling = sampling if grammar is None else replace(sampling, grammar=grammar)
        await registry.turns.compile_grammar(self.owner, sampling, body.min_tokens, self._cleanup)
        eos, text = self.services.tokens.eos_token_ids, replace(body.to_text_rule(), shown=shown)
        requests = [
            TurnRequest(
                prompt,
                sampling,
                body.to_stop_rule(max_tokens=room, eos_token_ids=eos),
                text,
                replace=True,
                pausable=False,
                param=prompt_field,
            )
            for prompt, room in zip(prompts, rooms, strict=True)
        ]
        # Before any session gives way: a refused call must close nothing.
        of_choices = [request for request in requests for _ in range(n)]
        charges = registry.turns.reserve(self.owner, of_choices, self._cleanup)
        with ExitStack() as undo:
            open_session = self._sessions(n, user, undo, prompts)
            choices = Choices(registry, requests, n, charges, open_session, self._cleanup, self._keyed)
            await choices.start()
            undo.pop_all()
        self._turn = None if self._session is None else self._session.turn
        return choices

    def _rooms(
        self, prompts: Sequence[Sequence[int]], max_tokens: int | None, prompt_field: str, limit_field: str
    ) -> list[int]:
        """How many tokens each prompt's turn may generate."""
        rooms = []
        for index, prompt in enumerate(prompts):
            field = prompt_field if len(prompts) == 1 else f"{prompt_field}.{index}"
            if not prompt:
                raise FieldOutOfRange(f"{field}: a turn needs at least 1 token to start from", param=field)
            turns = self.services.sessions.turns
            rooms.append(turns.room(len(prompt), max_tokens, param=field, limit_param=limit_field))
        return rooms

    def answer(self, response: Response) -> Response:
        """The response, with the session's id in its headers if the call was bound to one."""
        if self._session is not None:
            response.headers[SESSION_HEADER] = self._session.id
        return response

    def wait_for_tools(self, names: Sequence[str]) -> None:
        """The answer has called these tools: the session that the call is bound to waits until its next call."""
        services = self.services
        if self._session is not None and self._turn is not None and services.settings.park_on_tool_calls:
            services.sessions.wait_for_tools(self._session, self._turn, names)

    def _sessions(self, n: int, user: str | None, undo: ExitStack, prompts: Sequence[Sequence[int]]) -> OpenSession:
        """Where the choices run: each in a session that lives as long as the call, or the one in the bound session.

        `undo` gets what is to be done about it if they cannot start.
        """
        session = bound_session(self.services, self.owner, self._session_name, prompts, n=n, user=user, undo=undo)
        if session is None:
            # For all or none, for the same reason.
            self.services.sessions.make_room(self.owner, n * len(prompts))
            return partial(self.services.sessions.ephemeral, self.owner, metadata=labels(user))
        self._session = session
        self._cleanup.enter_context(holding(session))  # it moves to no other server before the call is over
        return lambda: nullcontext(session)


async def _openai_call(
    services: ServicesDep, owner: OwnerDep, cleanup: CleanupDep, session_name: SessionNameDep, keyed: KeyedDep
) -> OpenAICall:
    return OpenAICall(services, owner, cleanup, session_name, keyed)


OpenAICallDep = Annotated[OpenAICall, Depends(_openai_call)]


def check_model(services: Services, name: str) -> None:
    """Raise `UnknownModel` unless `name` is the served model's."""
    if name != services.info.name:
        raise UnknownModel(f"there is no model {name!r} here, only {services.info.name!r}", param="model")


def _check_count(settings: Settings, *, prompts: int, n: int) -> None:
    """Raise `FieldOutOfRange` for more choices than the server takes even if it has nothing else to do.

    Each has a session and a turn. Towards the end of the call all of them may run or wait at once.
    """
    param = "n" if n > 1 else "prompt"
    for limit, what in (
        (settings.max_sessions, "sessions can be open at once"),
        (settings.max_turns, "turns can run or wait at once"),
    ):
        if prompts * n > limit:
            raise FieldOutOfRange(
                f"{param}: {prompts} prompts with {n} choices each are too many: at most {limit} {what}", param=param
            )


def generation_responses(event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The documented `responses` of a generating route that streams `event`s."""
    session_id = {"description": "the session that the call was bound to", "schema": {"type": "string"}}
    return {
        **openai_errors(404, 409, 421, 429, 503),
        200: {
            "description": "The answer; with `stream`, an event for each chunk, then `[DONE]`.",
            "headers": {SESSION_HEADER: session_id, **IGNORED_DESCRIPTION},
            "content": {EventStream.media_type: {"schema": component(event)}},
        },
    }
