"""Which part may import which: read from the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WEB = ("fastapi", "starlette", "uvicorn", "asyncio", "pydantic", "pydantic_settings")
PLANNING = (
    "scheduler.py",
    "following.py",
    "segments.py",
    "sequence.py",
    "turn_state.py",
    "kv_files.py",
    "kv_blocks.py",
    "kv_cache.py",
    "sampling.py",
    "parts.py",
    "passes.py",
    "conditions.py",
    "interventions.py",
    "checkpoints.py",
    "checkpoint_handler.py",
    "checkpoint_reads.py",
    "checkpoint_writes.py",
    "turn_handler.py",
    "inspection.py",
    "inbox.py",
    "kv_arrivals.py",
    "kv_moves.py",
    "kv_tiers.py",
    "lower_tiers.py",
    "move_ledger.py",
    "move_meter.py",
    "phases.py",
    "placement.py",
    "returns.py",
    "saved_files.py",
    "transfers.py",
    "turns.py",
    "commands.py",
    "weights/alignment.py",
    "weights/ring.py",
    "weights/plan.py",
    "weights/arena.py",
    "weights/loan.py",
)
ENGINE_MAY_IMPORT = (
    "app.gpu",
    "app.activations",
    "app.breakpoints",
    "app.domain",
    "app.memory_map",
    "app.messages",
    "app.errors",
    "app.histories",
    "app.machine",
    "app.settings",
    "app.model_store",
)


PROGRAMS = (
    "loadgen.resume.pinned_offload",
    "loadgen.peers.baseline",
    "loadgen.weights.double_buffer",
    "loadgen.weights.offload",
)
"""Run by the load generator in processes of their own, and imported by nothing else of it."""


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that the file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no files in {folder}"
    return found


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def offences(paths: list[Path], *forbidden: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in paths
        for module in imports(path)
        if within(module, *forbidden)
    ]


def test_http_code_never_touches_tensors_or_the_engine() -> None:
    rooms = ("routers", "middleware", "openai", "schemas", "views", "journal")
    paths = [path for room in rooms for path in files(f"app/{room}")]
    paths += [path for path in (ROOT / "app").glob("*.py") if path.name != "main.py"]
    assert not offences(paths, "torch", "app.gpu")


def test_the_engine_knows_nothing_of_the_web() -> None:
    assert not offences(files("app/gpu"), *WEB)


def test_the_engine_imports_only_the_shared_vocabulary() -> None:
    others = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files("app/gpu")
        for module in imports(path)
        if within(module, "app") and module != "app" and not within(module, *ENGINE_MAY_IMPORT)
    ]
    assert not others


def test_the_doctor_judges_without_tensors_or_the_web() -> None:
    """So that it also runs where only the engine can."""
    assert not offences(files("app/doctor"), "torch", *WEB)


def test_planning_is_free_of_tensors() -> None:
    assert not offences([ROOT / "app/gpu" / name for name in PLANNING], "torch", "numpy")


@pytest.mark.parametrize("package", ["client", "loadgen"])
def test_clients_stand_alone(package: str) -> None:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files(package)}
    programs = [path for path, name in names.items() if within(name, *PROGRAMS)]
    others = [path for path in names if path not in programs]
    assert not offences(others, "app", "torch", "transformers", *PROGRAMS)
    assert not offences(programs, "app", "client")


def test_the_shared_vocabulary_stands_on_itself() -> None:
    modules = ("domain", "activations", "breakpoints", "errors", "histories", "memory_map")
    shared = (*(f"app.{name}" for name in modules), "app.messages")
    third_party = [
        module
        for path in [*(ROOT / "app" / f"{name}.py" for name in modules), *files("app/messages")]
        for module in imports(path)
        if not within(module, *shared, *sys.stdlib_module_names)
    ]
    assert not third_party


def test_nothing_imports_the_wiring_but_the_ways_in() -> None:
    paths = [path for path in files("app") if path.name not in ("main.py", "cli.py", "__main__.py")]
    assert not offences(paths, "app.main", "app.cli")
