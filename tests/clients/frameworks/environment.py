"""The frameworks in environments of their own, whose versions are pinned here, and the programs that run in them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.clients.environments import python_environment, run

FOLDER = Path(__file__).parent
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "LANGSMITH_TRACING": "false"}
"""No framework looks anything up, or reports to anybody."""


@cache
def python_of(requirements: str) -> str:
    """The Python of an environment with a file's packages; the first call installs them."""
    packages = (FOLDER / requirements).read_text().split()
    return str(python_environment(".venv-frameworks", Path(requirements).stem, packages, "--no-deps"))


def run_program(name: str, url: str, model: str, *, requirements: str = "requirements.txt") -> dict[str, Any]:
    """What one of `programs` found. Raises `AssertionError` if it fails."""
    said = run(python_of(requirements), str(FOLDER / "programs" / f"{name}.py"), url, model, **QUIET)
    found: dict[str, Any] = json.loads(next(line for line in said.splitlines() if line.startswith('{"received"')))
    return found
