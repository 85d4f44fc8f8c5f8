"""The file of bundles of a model: written once, and again only where it cannot be used."""

import logging
from collections.abc import Callable
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.gpu.weights.file import BundleFile
from app.gpu.weights.header import BundleContents, BundleFileUnusable, file_bytes
from app.gpu.weights.writer import FileWriter, writing
from app.machine.units import size
from app.model_store.install import exclusively

logger = logging.getLogger(__name__)


def open_bundle_file(path: Path, contents: BundleContents, fill: Callable[[FileWriter], None]) -> BundleFile:
    """The file `path` with the `contents`, which `fill` writes if it is not there.

    One process writes at a time; another one waits for it and then finds the file. Raises StoreFull, FieldOutOfRange if
    the file cannot be read or made, and whatever `fill` raises.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusively(path.with_name(f".{path.name}.lock")):
            file = _open_usable(path, contents)
            if file is None:
                path.unlink(missing_ok=True)  # there need not be room for both; who has it open goes on with it
                with writing(path, contents) as writer:
                    fill(writer)
                file = BundleFile(path, contents)
            return file
    except OSError as error:
        raise FieldOutOfRange(
            f"Djinn cannot write its copy of the weights to {path}: {error}", param="cache_dir"
        ) from error


def _open_usable(path: Path, contents: BundleContents) -> BundleFile | None:
    needed = size(file_bytes(contents))
    try:
        return BundleFile(path, contents)
    except FileNotFoundError:
        logger.info("writing %s of weights to %s, once", needed, path)
    except BundleFileUnusable as error:
        logger.warning("%s is not used: %s; writing it again, %s", path, error, needed)
    return None
