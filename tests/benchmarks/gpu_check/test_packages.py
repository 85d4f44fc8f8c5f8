"""What a GPU machine must have, and what is carried to it."""

import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_check.overlay import ROOT
from benchmarks.gpu_check.stage_list import STAGES
from benchmarks.gpu_check.stages.cuda_tests import OPTIONS, find_files

WHEELS = ROOT / "benchmarks" / "gpu_check" / "wheels.txt"
THERE = ("torch", "triton", "transformers", "accelerate")
"""Packages that a bare GPU machine has, with all that they require."""


def left_at_home() -> set[str]:
    """Modules that are installed here, but neither on a bare GPU machine nor in the wheels that go to it."""
    lines = WHEELS.read_text("utf-8").splitlines()
    there = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    waiting = [*THERE]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in there:
            there.add(name)
            with suppress(PackageNotFoundError):  # required for another platform only
                needs = [Requirement(each) for each in requires(name) or ()]
                waiting += [need.name for need in needs if "extra" not in str(need.marker)]
    return {
        module
        for module, packages in packages_distributions().items()
        if not there & {canonicalize_name(package) for package in packages} and "djinn-server" not in packages
    }


BARE = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in {left_at_home()} else self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""As if they were not installed."""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.long
def test_server_and_stages_can_be_imported_without_the_packages_that_only_a_cpu_needs() -> None:
    modules = [stage.module for stage in STAGES] + ["app.main", "app.web.server", "benchmarks.gpu_check.program"]
    code = BARE + "import importlib\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = run_python(code, *modules)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_cuda_tests_can_be_collected_without_them() -> None:
    files = find_files()
    assert files
    code = BARE + "import pytest\nsys.exit(pytest.main(sys.argv[1:]))"
    plugins = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout")  # those that travel
    done = run_python(code, "--collect-only", *OPTIONS, "--disable-plugin-autoload", *plugins, *files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_stage_lacks_is_said_by_name(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from benchmarks.gpu_check import child
from benchmarks.gpu_check.plan import TINY
from benchmarks.gpu_check.stage_list import STAGES
child.find_spec = lambda name: None if name in ("pydantic", "uvicorn") else name
(stage,) = [each for each in STAGES if each.name == "density"]
child.run_stage(stage, TINY, Path(sys.argv[1]), Path(sys.argv[1]).parent, 10)
"""
    done = run_python(code, str(tmp_path / "journal"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "journal").read_text().count("not installed: pydantic, uvicorn") == 1


def test_wheels_are_found_by_this_process_and_its_children(tmp_path: Path) -> None:
    wheels, packages = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    packages.mkdir()
    make_wheel(wheels)
    code = """
import subprocess, sys
from pathlib import Path
from benchmarks.gpu_check.overlay import prepare
prepare(Path(sys.argv[1]), Path(sys.argv[2]))
import djinn_carried
subprocess.run([sys.executable, "-c", "import djinn_carried, app"], cwd="/", check=True)
print(djinn_carried.ANSWER)
"""
    done = run_python(code, str(wheels), str(packages))
    assert done.stdout.strip() == "42", done.stderr


def make_wheel(folder: Path) -> None:
    """The smallest wheel that pip takes."""
    about = "djinn_carried-1.0.dist-info"
    files = {
        "djinn_carried.py": "ANSWER = 42\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: djinn-carried\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / "djinn_carried-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
