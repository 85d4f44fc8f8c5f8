"""Every test's fixtures are in tests/fixtures.py. This is how a run begins, and its processes share what takes long."""

import functools
import gc
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings

from tests.compiling import compile_kernels
from tests.processes import address_of_forks, forking, use_forks_of
from tests.waiting import wait_until

# On a busy machine any example can take long; `timeout` ends one that hangs.
settings.register_profile("full", deadline=None, max_examples=30)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("quick")

ServeWith = Callable[..., httpx.Client]
FORKS, COMPILED = "forks", "compiled"
FOLDER = pytest.StashKey[Path]()

DEFAULT_TIMEOUT_CONFIG.read = 60.0  # of HTTPX: 5 s are too few for a busy machine

# Each new client of HTTPX reads all certificates: 40 ms, and tests make thousands of clients.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]

# An environment that forbids bytecode would have each process of a run compile all of Djinn and of its tests again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Jsonschema makes a parser of IRIs, which takes over a second, where this package is installed. No schema here has any.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

gc.disable()  # until all tests are collected: imports make hardly any garbage


def pytest_configure(config: pytest.Config) -> None:
    """Not for the process that hands tests to others: it begins them sooner without all that fixtures import."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have each process begin with some of the files that may take longest: else one is alone with them at the end.

    Those are the files with a test that is given more time than the others. xdist deals the tests in equal parts, in
    their order, and takes from the end of a part what another process is to do.
    """
    usual, count = float(config.getini("timeout")), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = sorted({item.path for item in items if any(mark.args[0] > usual for mark in item.iter_markers("timeout"))})
    others, left = [item for item in items if item.path not in slow], len(items)
    dealt = list[pytest.Item]()
    for worker in range(count):
        first = [item for item in items if item.path in slow[worker::count]]
        rest = max(0, left // (count - worker) - len(first))
        dealt += first + others[:rest]
        others, left = others[rest:], len(items) - len(dealt)
    items[:] = dealt


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the garbage collector off the modules and tests: to go through them takes longer than most tests."""
    gc.freeze()
    gc.enable()
    if (shared := getattr(session.config, "workerinput", {})) and FORKS in shared:
        use_forks_of(shared[FORKS])
        wait_until(Path(shared[COMPILED]).exists)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Import what servers need, and compile, once for all processes, while these collect."""
    config.stash[FOLDER] = Path(tempfile.mkdtemp())
    compiling = forking().Process(target=compile_kernels, args=(config.stash[FOLDER] / COMPILED,))
    compiling.start()

    def end() -> None:
        compiling.join()
        shutil.rmtree(config.stash[FOLDER])

    config.add_cleanup(end)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell the worker where forks come from, and what says that all is compiled."""
    node.workerinput[FORKS] = address_of_forks()
    node.workerinput[COMPILED] = str(node.config.stash[FOLDER] / COMPILED)
