"""An empty environment with wheels that `make release` has built, and programs that run in it."""

import os
import subprocess
import sys
from pathlib import Path

from app.gpu.kernels.cpu.compile import kernel_folder

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PYTHON = os.environ.get("WHEEL_PYTHON", sys.executable)
"""Whose environment it is."""
OF_THE_CHECKOUT = ("PYTHONPATH", "VIRTUAL_ENV", "DJINN_CACHE_DIR")


def wheel_of(distribution: str) -> Path:
    (wheel,) = DIST.glob(f"{distribution}-*.whl")
    return wheel


class WheelEnvironment:
    """It is in `folder`. Its programs find neither the checkout nor anything of the user, and they run in a folder with
    packages of somebody else that have the same names as Djinn's.
    """

    def __init__(self, folder: Path) -> None:
        self._venv = folder / "venv"
        self.work = folder / "work"
        self._home = folder / "home"
        for name in ("app", "client", "djinn", "loadgen"):
            foreign = self.work / name / "__init__.py"
            foreign.parent.mkdir(parents=True)
            foreign.write_text("raise SystemExit('this is not of Djinn')\n")
        self._home.mkdir()
        cache = self._home / ".cache/djinn"
        cache.mkdir(parents=True)
        (cache / "kernels").symlink_to(kernel_folder())  # to recompile them takes half a minute
        subprocess.run([PYTHON, "-m", "venv", str(self._venv)], check=True, env=self._variables())

    def install_client(self) -> None:
        """Have pip install the client's wheel, with what it needs in the versions that are tested."""
        self._install(str(wheel_of("djinn_client")))

    def install_server(self, extras: str = "") -> None:
        """Have pip install both wheels, as the server's needs the client's."""
        self._install(str(wheel_of("djinn_client")), f"{wheel_of('djinn_server')}{extras}")

    def _install(self, *wheels: str) -> None:
        flags = ("--quiet", "--no-compile", "--disable-pip-version-check")
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        done = self.run("python", "-m", "pip", "install", *flags, *constraints, *wheels)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(program, arguments),
            cwd=self.work,
            env=self._variables(),
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program of the environment; its standard output can be read."""
        return subprocess.Popen(
            self._command(program, arguments), cwd=self.work, env=self._variables(), stdout=subprocess.PIPE, text=True
        )

    def _command(self, program: str, arguments: tuple[str, ...]) -> list[str]:
        return [str(self._venv / "bin" / program), *arguments]

    def _variables(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in OF_THE_CHECKOUT and not name.startswith("DJINN_")
        }
        return {**kept, "HOME": str(self._home)}
