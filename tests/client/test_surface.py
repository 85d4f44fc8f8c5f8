"""What users may rely on is what they get: names, fields, both halves of the client, and the examples of the guides."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest

import app.domain.breakpoints
import client
import djinn
from app.domain import values as domain
from app.openai.models import DefaultSampling, Model
from app.wire import activation_maps, breakpoints, checkpoint, memory, sessions, turns, vectors
from app.wire.sessions import ListSessionsQuery
from app.wire.turns import GenerateBody
from client import breakpoint_models, calls, memory_models, models
from client.answer import Answer
from tests.docs.blocks import PYTHON_GUIDES, blocks_of


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


@pytest.mark.parametrize("name", [name for name in client.__all__ if name.startswith("Async")])
def test_both_clients_offer_the_same(name: str) -> None:
    assert _offer(getattr(client, name)) == _offer(getattr(client, name.removeprefix("Async")))


def _offer(kind: type) -> dict[str, list[str]]:
    """Public methods and their parameters."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(method).parameters) for name, method in methods if name[0] != "_"}


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


def test_a_turn_takes_every_field_that_the_server_does() -> None:
    assert set(calls.TurnOptions.__annotations__) == set(GenerateBody.model_fields) - {"stream"}


def test_the_page_size_is_the_most_that_the_server_gives() -> None:
    ListSessionsQuery(limit=calls.PAGE_SIZE)
    with pytest.raises(ValueError, match="limit"):
        ListSessionsQuery(limit=calls.PAGE_SIZE + 1)


MODULES = (activation_maps, breakpoints, checkpoint, memory, sessions, turns, vectors)
WIRE: dict[str, Any] = {name: kind for module in MODULES for name, kind in vars(module).items()}
OTHER_NAMES = {
    "Usage": "TurnUsage",
    "PhaseChange": "Phase",
    "Guess": "LensToken",
    "MemoryMap": "Memory",
    "TierUse": "Tier",
}
ANSWERS = [
    kind
    for module in (models, breakpoint_models, memory_models)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Answer) and kind.__module__ == module.__name__
    if kind.__name__ not in ("ForkPoint", "Health", "Model", "DefaultSampling") and "[" not in kind.__name__
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_every_field_of_an_answer_reaches_the_user(answer: type[Answer]) -> None:
    name = OTHER_NAMES.get(answer.__name__, answer.__name__.removesuffix("Info"))
    view = WIRE[f"{name}View"] if f"{name}View" in WIRE else WIRE[name]
    assert set(answer.model_fields) == set(view.model_fields)


def test_of_a_model_all_but_what_only_openai_wants_reaches_the_user() -> None:
    assert set(models.Model.model_fields) == set(Model.model_fields) - {"object", "created", "owned_by"}
    assert set(models.DefaultSampling.model_fields) == set(DefaultSampling.model_fields)


ROOT = Path(__file__).parents[2]


def generate(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "client/_generate.py", *options]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The client and Ruff's settings, to be changed."""
    shutil.copytree(Path(client.__file__).parent, tmp_path / "client", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_blocking_half_is_as_generated() -> None:
    checked = generate(ROOT, "--check")
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.long
def test_a_change_of_either_half_makes_the_blocking_one_stale(checkout: Path) -> None:
    source, changed = (checkout / "client" / name for name in ("_async/vectors.py", "_sync/vectors.py"))
    extra, missing = (checkout / "client/_sync" / name for name in ("extra.py", "turn.py"))
    source.write_text(source.read_text().replace("async def list", "async def names"))
    extra.touch()
    missing.unlink()

    checked = generate(checkout, "--check")
    assert checked.returncode == 1
    assert [line.partition(" is stale")[0] for line in checked.stderr.splitlines()] == [
        str(path) for path in (extra, missing, changed)
    ]

    assert generate(checkout).returncode == 0
    assert "    def names" in changed.read_text()
    assert generate(checkout, "--check").returncode == 0


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
    exec(compile(example, "example", "exec", dont_inherit=True), {"__name__": "__main__"})
    out, err = capsys.readouterr()
    assert out
    assert err == ""


def test_every_error_is_documented() -> None:
    page = (ROOT / "docs/client.md").read_text("utf-8")
    errors = {name for name in client.__all__ if issubclass(getattr(client, name), Exception)}
    assert errors <= set(re.findall(r"`(\w+)`", page))
