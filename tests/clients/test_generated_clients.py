"""Generators make clients without a warning, and the clients run sessions, pauses and chats on a server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import run
from tests.clients.generators import (
    compile_typescript,
    openapi_generator,
    openapi_python_client,
    python_environment,
    run_node,
    run_program,
)
from tests.processes import serve_process

pytestmark = [pytest.mark.clients, pytest.mark.timeout(480)]

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_process(tmp_path_factory.mktemp("server") / "state") as server:
        yield server.url


@pytest.fixture(scope="module")
def document(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(httpx.get(f"{url}/openapi.json", timeout=30).raise_for_status().text)
    return path


def test_openapi_python_client(url: str, document: Path, tmp_path: Path) -> None:
    openapi_python_client(document, tmp_path / "plain_client")
    run_program(python_environment(), PROGRAMS / "plain_python.py", tmp_path, url)


def test_openapi_generator_for_python(url: str, document: Path, tmp_path: Path) -> None:
    openapi_generator("python", document, tmp_path, "--package-name", "standard_client")
    run_program(python_environment(), PROGRAMS / "standard_python.py", tmp_path, url)


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node and npm")
def test_generators_for_node(url: str, document: Path, tmp_path: Path) -> None:
    """TypeScript finds no error in the clients, nor in the programs that call them."""
    openapi_generator("typescript-fetch", document, tmp_path / "fetch")
    run_node("openapi-typescript", str(document), "-o", str(tmp_path / "types.ts"))
    run_node("openapi-ts", "-i", str(document), "-o", str(tmp_path / "hey"))
    programs = [Path(shutil.copy(PROGRAMS / name, tmp_path)) for name in ("standard_fetch.ts", "hey_api.ts")]
    compile_typescript(tmp_path / "types.ts", *programs, target=tmp_path / "compiled")
    for program in programs:
        run("node", str(tmp_path / "compiled" / f"{program.stem}.js"), url)
