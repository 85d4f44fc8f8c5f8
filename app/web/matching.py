"""Which route a request is for, also if it was refused before one was looked for."""

from collections.abc import Mapping
from typing import Any

from starlette.routing import Match


def matched(scope: Mapping[str, Any]) -> Mapping[str, Any]:
    """An ASGI scope with the route that its path has, and the parameters in its path; as it is where there is none."""
    if "route" in scope or "app" not in scope:
        return scope
    for route in scope["app"].state.routes:
        match, found = route.matches(scope)
        if match is not Match.NONE:
            return {**scope, "route": route, **found}
    return scope
