"""What every route needs: the server's parts, the caller, the session of the path, and the documented errors."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request

from app.anthropic.threads import Threads
from app.batches.files import FileStore
from app.batches.jobs import Places
from app.batches.runner import Batches
from app.cluster.cluster import Cluster
from app.domain.errors import Draining, JournalUnavailable, WrongRole
from app.domain.values import ModelInfo, SamplingDefaults
from app.events import EventStreams
from app.experiments.activations import ActivationJobs, Reader
from app.exports.exports import Spool
from app.journal.lease import FolderLease
from app.openai.response_events import BackgroundResponses
from app.openai.response_store import ResponseStore
from app.sessions.findings import Findings
from app.sessions.history import History
from app.sessions.keyed import KeyedRequest
from app.sessions.named import BoundSessions
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.side_work import SideWork
from app.sessions.uploads import Uploads
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.tenants.tenancy import Tenancy
from app.tenants.tenant import Role, Tenant
from app.text.tokenizer import Tokens
from app.tools.support import ToolSupport
from app.web.idempotency import HEADER as IDEMPOTENCY_HEADER
from app.web.idempotency import LONGEST_KEY
from app.wire.base import ErrorBody


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one running server."""

    settings: Settings
    info: ModelInfo
    sampling: SamplingDefaults
    tokens: Tokens
    metrics: Metrics
    sessions: SessionRegistry
    tool_support: ToolSupport
    bound_sessions: BoundSessions
    responses: ResponseStore
    background: BackgroundResponses
    threads: Threads
    spool: Spool
    side_work: SideWork
    uploads: Uploads
    tenancy: Tenancy
    cluster: Cluster | None
    """None: the server knows of no others."""
    lease: FolderLease | None
    """Of the state folder; None: no other server can have it."""
    files: FileStore
    places: Places
    batches: Batches
    activation_reader: Reader
    activation_jobs: ActivationJobs
    history: History
    findings: Findings
    events: EventStreams
    started_at: int
    """Unix seconds."""

    def require_ready(self) -> None:
        """Raise the error that says why no new work is taken."""
        if self.lease is not None:
            self.lease.require()
        if self.cluster is not None and self.cluster.draining.is_over:
            raise Draining("the server is shutting down, and its sessions have left")
        self.sessions.table.require_no_drain()
        self.sessions.executor.check()
        failure = self.sessions.keeper.state.failure
        if failure is not None:
            raise JournalUnavailable(f"the journal cannot be written: {failure}")


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


async def _owner(request: Request) -> str | None:
    owner: str | None = request.state.owner
    return owner


async def _is_operator(request: Request) -> bool:
    tenant: Tenant | None = request.state.tenant
    return tenant is not None and tenant.role is Role.OPERATOR


async def _only_operator(request: Request) -> None:
    tenant: Tenant | None = request.state.tenant
    if tenant is not None and tenant.role is not Role.OPERATOR:
        raise WrongRole(f"the role {tenant.role} may not do this: only the role operator may")


ServicesDep = Annotated[Services, Depends(_services)]
OwnerDep = Annotated[str | None, Depends(_owner)]
"""Who calls: the tenant's name, or None on a server without keys."""
OperatorDep = Annotated[bool, Depends(_is_operator)]
"""Whether the caller may see what other tenants have, but never their texts."""

OperatorOnlyDep = Depends(_only_operator)
"""Refuses callers of other roles. On a server without keys all callers are operators."""


async def _session(session_id: str, services: ServicesDep, owner: OwnerDep) -> AsyncIterator[Session]:
    with services.sessions.table.using(session_id, owner) as session:
        yield session


async def _any_session(
    session_id: str, services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep
) -> AsyncIterator[Session]:
    with services.sessions.table.using(session_id, owner, or_any=is_operator) as session:
        yield session


async def _cleanup() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


SessionDep = Annotated[Session, Depends(_session)]
"""The caller's session that the path names. It gives way to no other before the response is over."""

AnySessionDep = Annotated[Session, Depends(_any_session)]
"""The same for routes without text: by them an operator reaches the sessions of all tenants."""

CleanupDep = Annotated[AsyncExitStack, Depends(_cleanup)]
"""Unwound after the response, streamed or not, has been sent or has failed: where a turn's release belongs."""


async def _keyed(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias=IDEMPOTENCY_HEADER,
            min_length=1,
            max_length=LONGEST_KEY,
            pattern="^[ -~]+$",
            description="a key that the client chooses for this request, such as a UUID: a retry with the same key "
            "within a day gets the answer of the first, and nothing is done twice",
        ),
    ] = None,
) -> KeyedRequest | None:
    found: KeyedRequest | None = getattr(request.state, "keyed", None)
    return found


KeyedDep = Annotated[KeyedRequest | None, Depends(_keyed)]
"""The request by its `Idempotency-Key`; None: it has none."""


def note_session(request: Request, session: Session) -> None:
    """Tell the audit log of a session that the request has opened."""
    request.state.session = session.id


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that can fail with `statuses` beside those that every route can fail with."""
    every = (401, 403, 413, 422, 429, 500)
    return {status: {"model": ErrorBody} for status in sorted({*every, *statuses})}


def errors_of_file(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`errors` of a route that answers in JSON if `Accept` asks for it, and with a file by default.

    Some generated clients ask for the type of the errors, so this leaves it out: they would never get a file.
    """
    return {status: {"description": "An error, with the body `ErrorBody`"} for status in errors(*statuses)}
