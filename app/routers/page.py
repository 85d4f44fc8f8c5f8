"""The page in the browser, and the files that it loads. They hold no data, so they need no API key."""

from pathlib import Path

from fastapi import APIRouter, Request, Response

from app.domain.errors import NotFound
from app.web.static_folder import StaticFolder

router = APIRouter(include_in_schema=False)

FILES = StaticFolder(Path(__file__).parents[1] / "static")


@router.head("/")
@router.get("/")
async def get_page(request: Request) -> Response:
    """The inspector."""
    return await _file(request, "index.html")


@router.head("/docs")
@router.get("/docs")
async def get_docs(request: Request) -> Response:
    """All routes, to read and to try."""
    return await _file(request, "docs.html")


@router.head("/static/{name:path}")
@router.get("/static/{name:path}")
async def get_static(request: Request, name: str) -> Response:
    """One file of `app/static/`."""
    return await _file(request, name)


async def _file(request: Request, name: str) -> Response:
    response = await FILES.respond(request, name)
    if response is None:
        raise NotFound(f"no such file: {name}")
    return response
