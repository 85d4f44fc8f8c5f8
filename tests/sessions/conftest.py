"""What tests of sessions share."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI

from app.domain.values import ModelInfo
from app.messages import Command, Event, Replacement
from app.routers.dependencies import Services
from app.sessions.charges import MOST_DEATHS
from app.sessions.registry import SessionRegistry
from tests.bridge.engines import TalkingEngine, app_of
from tests.waiting import until


@pytest.fixture
def registry(services: Services) -> SessionRegistry:
    """The sessions of a server, without HTTP."""
    return services.sessions


@dataclass
class ListeningEngine(TalkingEngine):
    sent: list[Command] = field(default_factory=list)

    def send(self, command: Command) -> None:
        self.sent.append(command)

    def tell(self, *events: Event | Replacement) -> None:
        assert self.deliver is not None
        self.deliver(events)

    def last(self, kind: type[Command]) -> Command:
        return [command for command in self.sent if isinstance(command, kind)][-1]


@pytest.fixture
def engine(info: ModelInfo) -> ListeningEngine:
    return ListeningEngine(info)


@pytest.fixture
async def talking(engine: ListeningEngine) -> AsyncIterator[FastAPI]:
    app = app_of(engine, max_sessions=MOST_DEATHS)
    async with app.router.lifespan_context(app):
        await until(engine.runs.is_set)
        yield app


@pytest.fixture
def on_paper(talking: FastAPI) -> SessionRegistry:
    """Sessions whose engine says what the test has it say."""
    services: Services = talking.state.services
    return services.sessions
