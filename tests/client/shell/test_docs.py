"""The page about the shell: its commands run, and it knows every flag and every command of a conversation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
from client import Djinn
from client.shell.chat.commands import COMMANDS
from docs.site.pages import ROOT
from tests.docs.blocks import SHELL_GUIDE, blocks_of

PAGE = (ROOT / SHELL_GUIDE).read_text("utf-8")
BLOCKS = [block.text for block in blocks_of(SHELL_GUIDE) if block.language == "bash" and block.is_free]


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("djinn ")[1].split()[0])
def test_commands_run_as_they_are_printed(block: str, server_url: str, tmp_path: Path) -> None:
    command = tmp_path / ".venv/bin/djinn"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m app "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "DJINN_URL": server_url, "PYTHONPATH": str(ROOT)}
    with Djinn(server_url) as djinn, djinn.sessions.create():
        bash = ["bash", "-e", "-o", "pipefail", "-c", block]
        done = subprocess.run(bash, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout or "completion" in block
    for path in re.findall(r"> ~/(\S+)", block):
        assert "djinn" in (tmp_path / path).read_text()


def test_every_flag_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ps", "top", "chat", "bench"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    assert flags - set(re.findall(r"--[a-z][a-z-]*", PAGE)) == set()


def test_every_command_of_a_conversation_is_documented() -> None:
    assert {name for name in COMMANDS if f"`{name}" not in PAGE} == set()
