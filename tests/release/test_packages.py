"""`make dist`: what the wheels hold, and that their bytes depend on the commit alone."""

import os
import subprocess
import sys
import tarfile
import zipfile
from datetime import UTC, datetime
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = {"djinn_server": ("app", "loadgen"), "djinn_client": ("client", "djinn")}
ABOUT = {f"client/{name}" for name in ("_generate.py", "pyproject.toml", "README.md", "LICENSE")}
"""What a checkout has for itself, and what becomes the client's metadata."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone: a copy has no commit"),
]


def build(folder: Path, umask: int) -> Path:
    """`make dist` in a clone of the last commit in `folder`; returns the folder of what it has built."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, umask=umask)
    command = ["make", "--old-file", "setup-dev", "dist", f"VENV={sys.prefix}"]
    done = subprocess.run(command, cwd=folder, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("first") / "djinn", umask=0o022)


def test_builds_of_a_commit_have_the_same_bytes(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    other = build(tmp_path / "elsewhere", umask=0o077)
    assert sorted(os.listdir(dist)) == sorted(os.listdir(other))
    assert len(os.listdir(dist)) == 3
    for name in os.listdir(dist):
        assert (dist / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("distribution", PACKAGES)
def test_a_wheel_holds_each_file_of_its_packages_and_no_other(dist: Path, distribution: str) -> None:
    (wheel,) = dist.glob(f"{distribution}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    command = ["git", "ls-tree", "-r", "--name-only", "HEAD", *PACKAGES[distribution]]
    committed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert held == set(committed) - ABOUT
    assert {f"{package}/__init__.py" for package in PACKAGES[distribution]} <= held


def test_the_server_needs_the_client_of_its_own_version(dist: Path) -> None:
    server, client = (metadata(dist, distribution) for distribution in PACKAGES)
    (needed,) = (each for each in map(Requirement, server.get_all("Requires-Dist", [])) if each.name == client["Name"])
    assert str(needed.specifier) == f"=={client['Version']}"
    assert server["Version"] == client["Version"]


def test_the_source_makes_the_clients_wheel_too(dist: Path, tmp_path: Path) -> None:
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("djinn_client-*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (client,) = tmp_path.glob("*/client")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(client)]
    with zipfile.ZipFile(wheel) as archive:
        seconds = archive.infolist()[0].date_time
    epoch = int(datetime(*seconds, tzinfo=UTC).timestamp())
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def metadata(dist: Path, distribution: str) -> Message:
    (wheel,) = dist.glob(f"{distribution}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))
