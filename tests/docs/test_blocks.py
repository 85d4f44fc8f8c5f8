"""No command of the documentation goes unnoticed: a test runs it, or the page says why none can."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from app.cli import _parser
from docs.site.pages import ROOT
from loadgen.cli import make_parser
from tests.docs.blocks import Block, blocks_of, is_run, pages

BLOCKS = [block for page in pages() for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language == "bash"]
FENCE = re.compile(r"^ *```(?:bash|sh|shell|console|python|py)\b", re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
MEASURES = re.compile(r"\.venv/bin/python -m (benchmarks[\w.]*)(.*)")


def lines(blocks: list[Block]) -> list[str]:
    """Their commands, whole and without comments."""
    text = "\n".join(block.text.replace("\\\n", " ") for block in blocks)
    return [re.sub(r"\s#.*", "", line).strip() for line in text.splitlines()]


@pytest.mark.parametrize("page", pages())
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    mute = [block.text for block in blocks_of(page) if block.reason is None and not is_run(block)]
    assert mute == [], "run it, as tests/docs/blocks.py tells, or write `<!-- not run: WHY -->` above it"


@pytest.mark.parametrize("page", pages())
def test_no_block_has_a_form_that_is_not_looked_at(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    assert len(FENCE.findall(text)) == len(list(blocks_of(page)))
    assert text.count("<!-- not run: ") + text.count("<!-- run by ") == sum(
        not block.is_free and f"{block.reason or block.test} -->\n\n```" in text for block in blocks_of(page)
    )


def test_every_target_of_make_exists() -> None:
    named = {found[1] for line in lines(SHELL) if (found := re.match(r"(?:\w+=\S+ )*make ([a-z-]+)", line))}
    assert len(named) > 15
    assert named - TARGETS == set()


def test_every_command_line_of_the_load_generator_is_one() -> None:
    found = [line.partition(" -m loadgen ")[2] for line in lines(SHELL) if " -m loadgen " in line]
    assert len(found) > 20
    for arguments in found:
        make_parser().parse_args(shlex.split(arguments))


def test_every_command_line_of_djinn_is_one() -> None:
    found = [line.partition(".venv/bin/djinn ")[2] for line in lines(SHELL) if line.startswith(".venv/bin/djinn ")]
    assert len(found) > 15
    for arguments in found:
        words = shlex.split(re.split(r"[|>]", arguments)[0])
        if words != ["--version"]:
            _parser().parse_args(words)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_benchmark_has_the_flags_that_the_pages_give_it() -> None:
    flags: dict[str, set[str]] = {}
    for line in lines(SHELL):
        if found := MEASURES.match(line):
            flags.setdefault(found[1], set()).update(re.findall(r"--[a-z-]+", found[2]))
    assert len(flags) > 10
    for module, given in flags.items():
        told = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        assert given - set(re.findall(r"--[a-z-]+", told.stdout)) == set(), module
