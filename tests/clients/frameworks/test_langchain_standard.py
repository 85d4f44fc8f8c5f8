"""LangChain's standard suite of integration tests for a chat model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.clients.environments import run
from tests.clients.frameworks.conftest import Served
from tests.clients.frameworks.environment import FOLDER, QUIET, python_of

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


def test_langchains_standard_suite(tiny: Served, tmp_path: Path) -> None:
    """It runs in a folder of its own: pytest would import the packages around it, and they import Djinn."""
    suite = tmp_path / "test_standard.py"
    shutil.copy(FOLDER / "programs" / "langchain_standard.py", suite)
    alone = ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), "--asyncio-mode=auto"]
    server = {"DJINN_URL": tiny.url, "DJINN_MODEL": tiny.model}
    said = run(python_of("requirements.txt"), "-m", "pytest", "-q", *alone, str(suite), **server, **QUIET)
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|skipped|xfailed|xpassed|failed)", said)}
    assert "failed" not in counts, said
    assert counts["skipped"] == 11, said
    assert counts["passed"] + counts.get("xpassed", 0) >= 31, said
