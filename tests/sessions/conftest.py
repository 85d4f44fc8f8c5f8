"""What tests of sessions share."""

import pytest

from app.routers.dependencies import Services
from app.sessions.registry import SessionRegistry


@pytest.fixture
def registry(services: Services) -> SessionRegistry:
    """The sessions of a server, without HTTP."""
    return services.sessions
