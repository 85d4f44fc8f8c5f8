"""`djinn completion`: what shells make of the scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from app.cli import main

ASK_BASH = r"""
source "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
_shtab_djinn
printf '%s\n' "${COMPREPLY[@]}"
"""


def script_of(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    path = folder / f"djinn.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def run(*command: str, **variables: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True, env={**os.environ, **variables}
    )
    assert done.stderr == ""
    return done.stdout


def ask_bash(script: Path, *words: str) -> set[str]:
    return {word.strip() for word in run("bash", "-c", ASK_BASH, "bash", str(script), *words).splitlines()}


def test_bash_completes_commands_flags_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("bash", tmp_path, capsys)
    assert {"serve", "ps", "top", "chat", "completion"} <= ask_bash(script, "djinn", "")
    assert {"--json", "--watch", "--url"} <= ask_bash(script, "djinn", "ps", "--")
    assert ask_bash(script, "djinn", "ps", "--state", "pa") == {"paused"}
    assert ask_bash(script, "djinn", "serve", "--kv-policy", "") == {"signal", "lru", "none"}
    assert {"--full", "--rivals", "--output"} <= ask_bash(script, "djinn", "bench", "--")
    assert "smollm2-135m-instruct" in ask_bash(script, "djinn", "models", "pull", "")
    (tmp_path / "states").mkdir()
    assert str(tmp_path / "states") in ask_bash(script, "djinn", "serve", "--state-dir", f"{tmp_path}/st")


def test_fish_completes_commands_flags_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("fish", tmp_path, capsys)
    def ask(line: str) -> set[str]:
        found = run("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'", HOME=str(tmp_path))
        return {each.partition("\t")[0] for each in found.splitlines()}

    assert {"serve", "ps", "top", "chat", "completion"} <= ask("djinn ")
    assert {"--json", "--watch", "--url"} <= ask("djinn ps --")
    assert ask("djinn ps --state pa") == {"paused"}


def test_zsh_loads_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of("zsh", tmp_path, capsys)
    assert script.read_text().startswith("#compdef djinn\n")
    setup = f'autoload -Uz compinit; compinit -u -d {tmp_path}/dump; eval "$(< {script})"; print $_comps[djinn]'
    assert run("zsh", "-f", "-c", setup).strip() == "_shtab_djinn"
