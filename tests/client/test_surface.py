"""What users may rely on is what they get: names, fields, both clients, packages, and the examples of the guides."""

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pytest
from anthropic import Anthropic
from openai import OpenAI
from packaging.requirements import Requirement

import app.domain.breakpoints
import client
import djinn
from app.batches import requests
from app.cli import main
from app.domain import values as domain
from app.experiments import activations
from app.openai.models import DefaultSampling, Model
from app.wire import base, breakpoints, checkpoint, dictionaries, edits, maps, memory, points, probes, sessions, turns
from client import Djinn, breakpoint_models, job_models, memory_models, models
from client.answer import Answer
from client.shell.chat.commands import COMMANDS
from docs.site.pages import ROOT
from tests.docs.blocks import PYTHON_GUIDES, SHELL_GUIDE, blocks_of


def test_public_names() -> None:
    public = {name for name, value in vars(client).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == set(client.__all__)


def test_djinn_offers_what_the_client_does() -> None:
    assert djinn.__all__ == client.__all__
    assert all(getattr(djinn, name) is getattr(client, name) for name in client.__all__)
    assert Path(djinn.__file__).with_name("py.typed").is_file()


@pytest.mark.parametrize("package", ["client", "djinn"])
def test_importing_the_client_imports_neither_server_nor_torch(package: str) -> None:
    code = f"import sys, {package}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "httpx" in loaded
    assert not {"app", "torch", "fastapi"} & set(loaded)


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (models.SessionState, domain.SessionState),
        (models.Phase, domain.Phase),
        (models.Tier, domain.Tier),
        (models.Residency, domain.Residency),
        (models.FinishReason, domain.FinishReason),
        (breakpoint_models.Pass, app.domain.breakpoints.Pass),
        (breakpoint_models.Action, app.domain.breakpoints.Action),
        (breakpoint_models.Op, app.domain.breakpoints.EditOp),
        (breakpoint_models.OnTimeout, app.domain.breakpoints.OnTimeout),
    ],
)
def test_the_client_knows_every_word_of_the_server(known: object, words: type[StrEnum]) -> None:
    assert set(get_args(known)) == set(words)


MODULES = (
    activations, base, maps, breakpoints, checkpoint, dictionaries, edits, memory, points, probes, requests, sessions,
    turns,
)  # fmt: skip
WIRE: dict[str, Any] = {name: kind for module in MODULES for name, kind in vars(module).items()}
OTHER_NAMES = {
    "Usage": "TurnUsage",
    "PhaseChange": "Phase",
    "Guess": "LensToken",
    "MemoryMap": "Memory",
    "TierUse": "Tier",
    "LensInfo": "NamedLens",
    "ProbeInfo": "NamedProbe",
    "ProbeGuard": "Probe",
    "FeatureRule": "Feature",
    "EditGate": "Gate",
}
ANSWERS = [
    kind
    for module in (models, breakpoint_models, memory_models, job_models)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Answer) and kind.__module__ == module.__name__
    if kind.__name__
    not in ("ForkPoint", "Health", "Model", "DefaultSampling", "Tokenized", "Detokenized", "ActivationsJobPage")
    if "[" not in kind.__name__
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_field_of_an_answer_reaches_the_user(answer: type[Answer]) -> None:
    name = OTHER_NAMES.get(answer.__name__, answer.__name__.removesuffix("Info"))
    view = WIRE[f"{name}View"] if f"{name}View" in WIRE else WIRE[name]
    assert set(answer.model_fields) == set(view.model_fields) - {"object"}


def test_of_a_model_all_but_what_only_openai_wants_reaches_the_user() -> None:
    assert set(models.Model.model_fields) == set(Model.model_fields) - {"object", "created", "owned_by"}
    assert set(models.DefaultSampling.model_fields) == set(DefaultSampling.model_fields)


@pytest.mark.dev
def test_the_blocking_half_is_as_generated() -> None:
    command = [sys.executable, "client/_generate.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


EXAMPLES = [
    pytest.param(block.text, id=f"{guide}-{number}")
    for guide in PYTHON_GUIDES
    for number, block in enumerate(blocks_of(guide))
    if block.language == "python" and block.is_free
]
SMALLER = {"smollm2-135m-instruct": "tiny-llama", "layer=27": "layer=2", "layer=15": "layer=1"}
"""The guides are for a model of 30 layers, the tests' model has 4."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_as_they_are_printed(
    example: str, server_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for printed, here in {"http://127.0.0.1:8000": server_url, **SMALLER}.items():
        example = example.replace(printed, here)
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(example, "example", "exec", dont_inherit=True), made)
    for each in made.values():
        if isinstance(each, OpenAI | Anthropic):  # collected open, it may warn of its sockets in a later test
            each.close()
    out, err = capsys.readouterr()
    assert out
    assert err == ""


def test_every_error_is_documented() -> None:
    page = (ROOT / "docs/client.md").read_text("utf-8")
    public = {name: getattr(client, name) for name in client.__all__}
    errors = {name for name, kind in public.items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert errors <= set(re.findall(r"`(\w+)`", page))


def read(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text("utf-8"))


def needed(project: dict[str, Any], *more: str) -> dict[str, str]:
    """The range of versions of each package, by its name, those of the extras that the server has, and of `more`."""
    extras = project["project"]["optional-dependencies"]
    listed = [
        *project["project"]["dependencies"],
        *chain(*(extras.get(each, ()) for each in ("numpy", "shell", *more))),
    ]
    return {each.name: str(each.specifier) for each in map(Requirement, listed)}


def imported() -> set[str]:
    """The packages of others that the client imports."""
    found = set()
    for path in (ROOT / "client").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if path.name != "_generate.py" else ():
            if isinstance(node, ast.Import):
                found |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return {name.replace("_", "-") for name in found - sys.stdlib_module_names - {"client"}}


def test_the_client_asks_for_what_it_imports() -> None:
    asked = set(needed(read("client/pyproject.toml"), "transformer-lens", "inspect"))
    assert asked - {"openai"} == imported() - {"torch"}  # which Inspect imports, and TransformerLens brings


def test_the_server_asks_for_the_same_and_is_built_with_the_same() -> None:
    ours, servers = read("client/pyproject.toml"), read("pyproject.toml")
    assert needed(ours).items() <= needed(servers).items()
    assert ours["build-system"] == servers["build-system"]
    assert ours["project"]["requires-python"] == servers["project"]["requires-python"]


PAGE = (ROOT / SHELL_GUIDE).read_text("utf-8")
BLOCKS = [block.text for block in blocks_of(SHELL_GUIDE) if block.language == "bash" and block.is_free]


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("djinn ")[1].split()[0])
def test_commands_run_as_they_are_printed(block: str, server_url: str, tmp_path: Path) -> None:
    command = tmp_path / ".venv/bin/djinn"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m app "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "DJINN_BASE_URL": server_url, "PYTHONPATH": str(ROOT)}
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
