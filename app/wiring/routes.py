"""Every route."""

from fastapi import FastAPI

from app.routers import (
    activation_maps,
    breakpoints,
    checkpoint,
    events,
    export,
    generate,
    move,
    page,
    phase,
    resume,
    sessions,
    system,
    vectors,
)
from app.routers.anthropic import messages as anthropic_messages
from app.routers.openai import chat, completions, models, responses, responses_kept, responses_socket, tokenize

ROUTERS = (
    sessions,
    generate,
    breakpoints,
    checkpoint,
    activation_maps,
    resume,
    vectors,
    phase,
    export,
    move,
    chat,
    completions,
    responses,
    responses_kept,
    models,
    tokenize,
    anthropic_messages,
    events,
    system,
    page,
)


def add_routes(app: FastAPI) -> None:
    """Add all of them, in the order in which the API's document names them. `app.state.routes` are they, for
    `web.matching`: the framework hides those of a router in it.
    """
    for module in ROUTERS:
        app.include_router(module.router)
    app.router.routes.append(responses_socket.ROUTE)
    app.state.routes = [*(route for module in ROUTERS for route in module.router.routes), responses_socket.ROUTE]
