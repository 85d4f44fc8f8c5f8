"""The version comes from git's tags, and a copy without git has one too."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

pytest.importorskip("hatch_vcs", reason="make setup-dev installs it")
pytestmark = pytest.mark.dev

ROOT = Path(__file__).parents[2]
AUTHOR = ("-c", "user.name=Djinn", "-c", "user.email=djinn@example.org")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What decides about the versions, in a folder that git knows nothing of."""
    for name in ("pyproject.toml", "README.md", "client/pyproject.toml", "client/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *AUTHOR, *arguments], cwd=folder, check=True, capture_output=True)


def version_in(folder: Path) -> str:
    """The server's, which must be the client's too."""
    command = [sys.executable, "-m", "hatchling", "version"]
    said = []
    for project in (folder, folder / "client"):
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout.strip())
    (version,) = set(said)
    return version


def test_a_copy_without_git_has_a_version_before_all_releases(copy: Path) -> None:
    assert version_in(copy) == "0.0"


def test_a_tag_is_the_version_and_each_commit_after_it_comes_before_the_next(copy: Path) -> None:
    git(copy, "init", "--quiet")
    git(copy, "add", ".")
    git(copy, "commit", "--quiet", "--message", "Begin")
    untagged = Version(version_in(copy))
    assert untagged < Version("0.1")
    assert untagged.is_devrelease
    git(copy, "tag", "v1.2.0")
    assert version_in(copy) == "1.2.0"
    git(copy, "commit", "--quiet", "--allow-empty", "--message", "Go on")
    later = Version(version_in(copy))
    assert Version("1.2.0") < later < Version("1.2.1")
    assert (later.dev, (later.local or "")[0]) == (1, "g")
