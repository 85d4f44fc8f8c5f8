"""The documentation's examples run, and its table of errors is whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import client

TEXT = (Path(__file__).parents[2] / "docs/client.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_as_they_are_printed(example: str, server_url: str) -> None:
    command = [sys.executable, "-W", "error", "-c", example.replace("http://127.0.0.1:8000", server_url)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


def test_every_error_is_documented() -> None:
    errors = {name for name in client.__all__ if issubclass(getattr(client, name), Exception)}
    assert errors <= set(re.findall(r"`(\w+)`", TEXT))
