"""The examples of the guides run, and the client's table of errors is whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import client
from tests.docs.blocks import PYTHON_GUIDES, blocks_of

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(block.text, id=f"{guide}-{number}")
    for guide in PYTHON_GUIDES
    for number, block in enumerate(blocks_of(guide))
    if block.language == "python" and block.is_free
]
SMALLER = {"smollm2-135m-instruct": "tiny-llama", "layer=27": "layer=2", "layer=15": "layer=1"}
"""The guides are for a model of 30 layers, the tests' model has 4."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_as_they_are_printed(example: str, server_url: str) -> None:
    for printed, here in {"http://127.0.0.1:8000": server_url, **SMALLER}.items():
        example = example.replace(printed, here)
    command = [sys.executable, "-W", "error", "-c", example]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


def test_every_error_is_documented() -> None:
    page = (ROOT / "docs/client.md").read_text("utf-8")
    errors = {name for name in client.__all__ if issubclass(getattr(client, name), Exception)}
    assert errors <= set(re.findall(r"`(\w+)`", page))
