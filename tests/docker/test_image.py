"""The image: what the Dockerfile names is there, the locks fit, and the script that builds and proves it here."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.cli import main
from tests.docker.reading import DOCKER, ROOT, image_environment, instructions, pinned, served
from tests.journal.building import FILE, filled

LOCKS = ("requirements.txt", "requirements-cuda.txt", "requirements-loadgen.txt", "requirements-build.txt")


def test_every_file_that_is_copied_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for each in instructions("COPY") if "--from" not in each for word in each.split()[:-1]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {*packages, "client", "djinn", "hatch_build.py", "pyproject.toml", "constraints.txt"} <= set(copied)
    for word in copied:
        assert list(ROOT.glob(word)), word
        assert word in allowed or word.replace("requirements*", "*") in allowed, word


def test_the_image_serves_by_default_writes_to_the_volumes_only_and_has_no_rights_of_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (user,), (volumes,) = instructions("USER"), map(json.loads, instructions("VOLUME"))
    assert int(user.partition(":")[0]) > 0
    environment = image_environment()
    written = {name for name in environment if name == "HOME" or name.endswith(("_DIR", "_HOME"))}
    assert {"HOME", "DJINN_STATE_DIR", "DJINN_CACHE_DIR"} <= written
    assert all(environment[name].startswith(tuple(volumes)) for name in written)
    (entry,), (command,) = (list(map(json.loads, instructions(word))) for word in ("ENTRYPOINT", "CMD"))
    assert entry[-1] == "djinn"
    for name, value in {**environment, "DJINN_API_KEY": "sesame"}.items():
        monkeypatch.setenv(name, value)
    settings = served(command)  # which refuses a variable that is no setting
    assert (settings.host, settings.needs_key) == ("0.0.0.0", True)
    (check,) = instructions("HEALTHCHECK")
    words = json.loads(check.partition(" CMD ")[2])
    assert "/ready" in words[-1]
    assert environment["DJINN_PORT"] in instructions("EXPOSE")
    compile(words[-1], "HEALTHCHECK", "exec")


def test_a_backup_in_a_container_needs_no_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As docs/container.md has it, for the user that the image runs as."""
    ours = {"DJINN_STATE_DIR": str(tmp_path / "state"), "DJINN_API_KEY": "sesame"}
    for name, value in {**image_environment(), **ours}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "state").mkdir()
    filled(tmp_path / "state" / FILE)
    page = (ROOT / "docs/container.md").read_text("utf-8")
    assert "docker exec djinn djinn backup /backups/monday" in page
    assert main(["backup", str(tmp_path / "monday")]) == 0
    (user,) = instructions("USER")
    assert f"--owner {user.partition(':')[0]} --group {user.partition(':')[2]}" in page


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_hashes_and_the_version_that_djinn_is_tested_with(name: str) -> None:
    text = (DOCKER / name).read_text()
    tested, locked = pinned("constraints.txt"), pinned(f"docker/{name}")
    assert {each: version for each, version in locked.items() if tested.get(each, version) != version} == {}
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked) > 5
    for entry in entries:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_the_locks_have_all_that_the_project_asks_for() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    locked = pinned("docker/requirements.txt")
    with_torch = locked | pinned("docker/requirements-cuda.txt")
    with_loadgen = locked | pinned("docker/requirements-loadgen.txt")
    for asked, there in (
        (project["dependencies"], with_torch),
        (project["optional-dependencies"]["otel"], locked),
        (project["optional-dependencies"]["loadgen"], with_loadgen),
        (document["build-system"]["requires"], pinned("docker/requirements-build.txt")),
    ):
        for each in map(Requirement, asked):
            assert each.specifier.contains(there[canonicalize_name(each.name)]), each
    assert not {"torch", "triton"} & locked.keys()  # their CPU builds are on another index


BUILDAH = """#!/usr/bin/env bash
echo "$@" >> "$CALLS"
case "$*" in
    *" from "*) echo container-7 ;;
    *" mount "*) echo "$ROOT" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs are, with the container's `root`."""
    (tmp_path / "root").mkdir()
    for name, script in {"buildah": BUILDAH, "install": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    for name, path in {"CALLS": "calls", "ROOT": "root", "FOLDER": "images"}.items():
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def prove(folder: Path, status: int) -> subprocess.CompletedProcess[str]:
    """Run it with a proof that ends with `status`."""
    (folder / "python3").write_text(f"#!/bin/sh\necho proof\nexit {status}\n")
    (folder / "python3").chmod(0o755)
    return subprocess.run([DOCKER / "build-here.sh", "prove"], capture_output=True, text=True)


@pytest.mark.parametrize("status", [0, 1])
def test_it_leaves_no_container_whatever_the_proof_says(folder: Path, status: int) -> None:
    done = prove(folder, status)
    assert done.returncode == status, done.stderr
    assert "proof" in done.stdout
    assert (folder / "calls").read_text().endswith(" rm container-7\n")


def test_an_image_above_one_and_a_half_gigabytes_is_refused(folder: Path) -> None:
    with (folder / "root/large").open("wb") as file:
        file.truncate(1_501_000_000)  # of holes
    done = prove(folder, 0)
    assert done.returncode == 1
    assert "that is more than 1500 MB" in done.stderr
    assert "proof" not in done.stdout
    assert (folder / "calls").read_text().endswith(" rm container-7\n")
