"""djinn-client asks for what the client imports. So does djinn-server, as an editable installation has it alone."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TOOL = "_generate.py"
"""Of the checkout."""


def read(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text("utf-8"))


def needed(project: dict[str, Any]) -> dict[str, str]:
    """The range of versions of each package, by its name."""
    return {each.name: str(each.specifier) for each in map(Requirement, project["project"]["dependencies"])}


def imported() -> set[str]:
    """The packages of others that the client imports."""
    found = set()
    for path in (ROOT / "client").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.name != TOOL else ():
            if isinstance(node, ast.Import):
                found |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return {name.replace("_", "-") for name in found - sys.stdlib_module_names - {"client"}}


def test_the_client_asks_for_what_it_imports() -> None:
    assert set(needed(read("client/pyproject.toml"))) == imported()


def test_the_server_asks_for_the_same_and_is_built_with_the_same() -> None:
    client, server = read("client/pyproject.toml"), read("pyproject.toml")
    assert needed(client).items() <= needed(server).items()
    assert client["build-system"] == server["build-system"]
    assert client["project"]["requires-python"] == server["project"]["requires-python"]
