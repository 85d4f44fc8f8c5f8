"""The parts of a running server, put together: what every route finds."""

import time
from collections.abc import Sequence

from app.bridge.executor import Engine, EngineExecutor
from app.cluster.moves.bindings import Bindings
from app.cluster.moves.cluster import Cluster, Membership
from app.domain.values import KVPolicy, SamplingDefaults
from app.events.feed import Feed
from app.events.streams import EventStreams
from app.exports.spool import Spool
from app.journal.journal import Journal
from app.machine.disk import DiskRoom
from app.metrics.server import Metrics
from app.openai.responses.store import ResponseStore
from app.routers.dependencies import Services
from app.sessions.bound.sessions import BoundSessions
from app.sessions.bound.tool_waits import ToolWaits
from app.sessions.keeper import SessionKeeper
from app.sessions.lifecycle import Notices
from app.sessions.registry import SessionRegistry
from app.sessions.session import Session
from app.sessions.table import SessionTable
from app.sessions.whitebox.vectors import Vectors
from app.settings import Settings
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens
from app.tools.support import ToolSupport
from app.traces.base import Traces


def open_services(
    settings: Settings,
    engine: Engine,
    tokens: Tokens,
    tenancy: Tenancy,
    keeper: SessionKeeper,
    restored: Sequence[Session],
    *,
    journal: Journal | None,
    room: DiskRoom,
    traces: Traces | None,
    member: Membership | None,
    sampling: SamplingDefaults,
) -> Services:
    """Around the engine, which need not run yet. `restored` are the sessions that `keeper` has found in the journal."""
    feed, metrics, tool_waits = Feed(), Metrics(engine.info.name), ToolWaits()
    table = SessionTable(settings.max_sessions, tenancy.quotas, feed)
    registry = SessionRegistry(
        EngineExecutor(engine, Notices(table, keeper).take),
        table,
        keeper,
        tokens,
        metrics,
        settings,
        tenancy.quotas,
        on_queued=tool_waits.end,
        traces=traces,
    )
    responses = _responses(settings, registry, journal, restored)
    bound_sessions = BoundSessions(registry, restored)
    bindings = Bindings(bound_sessions, responses, tool_waits, keeper.keyed)
    return Services(
        settings=settings,
        info=engine.info,
        sampling=sampling,
        tokens=tokens,
        metrics=metrics,
        sessions=registry,
        tool_support=ToolSupport(tokens),
        bound_sessions=bound_sessions,
        tool_waits=tool_waits,
        responses=responses,
        spool=_spool(settings, room),
        side_work=registry.side_work,
        vectors=Vectors(journal, keeper.room),
        tenancy=tenancy,
        cluster=None if member is None else Cluster(registry, tenancy.directory, member, bindings),
        lease=None if journal is None else journal.lease,
        events=EventStreams(feed, registry, KVPolicy(settings.kv_policy), metrics.event_streams),
        started_at=int(time.time()),
    )


def _responses(
    settings: Settings, registry: SessionRegistry, journal: Journal | None, restored: Sequence[Session]
) -> ResponseStore:
    """The responses that are kept, with those of the journal's sessions."""
    limit, max_bytes = settings.max_responses, int(settings.max_responses_bytes)
    store = ResponseStore(registry, journal, limit=limit, max_bytes=max_bytes)
    store.restore(restored)
    return store


def _spool(settings: Settings, room: DiskRoom) -> Spool:
    """Where session files are on their way in and out: beside the journal, if there is one."""
    folder = settings.state_dir and settings.state_dir.expanduser() / "tmp"
    return Spool(folder, room.beside(folder) if folder else room, int(settings.max_spool_bytes))
