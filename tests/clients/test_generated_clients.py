"""Generators make clients without a warning, and the clients run sessions, pauses and chats on a server process."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.generators import (
    openapi_generator,
    openapi_python_client,
    python_environment,
    run_node,
    run_program,
)
from tests.processes import serve_process

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240)]

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_process(tmp_path_factory.mktemp("server") / "state") as server:
        yield server.url


OTHER_APIS = ("/v1/responses", "/v1/messages")
"""Their own SDKs are their clients. Generators have no names for the unions in their lists."""


@pytest.fixture(scope="module")
def document(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(json.dumps(_without(httpx.get(f"{url}/openapi.json").raise_for_status().json(), OTHER_APIS)))
    return path


def _without(document: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """The document without the routes of other APIs, and without the schemas that only they refer to."""
    paths = {path: item for path, item in document["paths"].items() if not path.startswith(prefixes)}
    schemas: dict[str, Any] = document["components"]["schemas"]
    used, new = set[str](), _named(paths)
    while new - used:
        used |= new
        new = _named([schemas[name] for name in used])
    document["components"]["schemas"] = {name: schema for name, schema in schemas.items() if name in used}
    return {**document, "paths": paths}


def _named(node: object) -> set[str]:
    return set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(node)))


def test_openapi_python_client(url: str, document: Path, tmp_path: Path) -> None:
    openapi_python_client(document, tmp_path / "plain_client")
    run_program(python_environment(), PROGRAMS / "plain_python.py", tmp_path, url)


def test_openapi_generator_for_python(url: str, document: Path, tmp_path: Path) -> None:
    openapi_generator("python", document, tmp_path, "--package-name", "standard_client")
    run_program(python_environment(), PROGRAMS / "standard_python.py", tmp_path, url)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
def test_generators_for_node(url: str, document: Path, tmp_path: Path) -> None:
    """Each makes its client; TypeScript finds no error in what they made."""
    openapi_generator("typescript-fetch", document, tmp_path / "fetch")
    run_node("openapi-typescript", str(document), "-o", str(tmp_path / "types.ts"))
    run_node("openapi-ts", "-i", str(document), "-o", str(tmp_path / "hey"))
    # The fetch client is not compiled: its generator imports a check of unions in lists that it does not write.
    sources = [tmp_path / "types.ts", tmp_path / "hey" / "index.ts"]
    options = ["--noEmit", "--skipLibCheck", "--strict", "--target", "es2022", "--moduleResolution", "bundler"]
    run_node("tsc", *options, "--module", "esnext", "--lib", "es2022,dom,dom.iterable", *map(str, sources))
