"""Making a bare machine fit to run the checkout: packages that were carried along, and the name under which it goes.

Standard library only: it runs before anything else can be imported.
"""

import importlib
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class BadWheels(Exception):
    """The wheels that were carried along cannot be installed; the message says why."""


def prepare(wheels: Path | None, folder: Path) -> None:
    """Install `wheels` (None: nothing) into the empty `folder`, and have this process and its children find them, and
    the checkout, first. Raises `BadWheels`.
    """
    if wheels is not None:
        _install(wheels, folder)
    try:
        version("djinn-server")
    except PackageNotFoundError:
        _name_checkout(folder)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), *([before] if before else [])])
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _install(wheels: Path, folder: Path) -> None:
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    if not files:
        raise BadWheels(f"there are no wheels in {wheels}: `make gpu-wheels` puts them there")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", str(folder), *files], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BadWheels(f"pip could not install the wheels in {wheels}:\n{done.stderr}")


def _name_checkout(folder: Path) -> None:
    """What an installation of a checkout without git would say of itself: the server asks for its version."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
    fallback = hatch["version"]["fallback-version"]
    about = folder / f"djinn_server-{fallback}.dist-info"
    about.mkdir()
    lines = ("Metadata-Version: 2.1", "Name: djinn-server", f"Version: {fallback}", "")
    (about / "METADATA").write_text("\n".join(lines))
