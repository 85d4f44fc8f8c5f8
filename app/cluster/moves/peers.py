"""The file of `--peers`: the name and the URL of each server of the cluster, as YAML or JSON.

a: http://10.0.0.1:8000
b: http://10.0.0.2:8000
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from app.domain.errors import FieldOutOfRange
from app.domain.homes import REPLICA_NAME
from app.machine.files import explain

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """One server of the cluster."""

    name: str
    url: str
    """Without a slash at its end."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80


class Peers:
    """The servers of the cluster, this one perhaps among them. The file is read again on request."""

    def __init__(self, path: Path) -> None:
        """Raises `FieldOutOfRange` if the file cannot be used."""
        self._path = path
        self._peers = read_peers(path)

    @property
    def urls(self) -> Mapping[str, str]:
        """The URL of each by its name."""
        return {peer.name: peer.url for peer in self._peers.values()}

    def find(self, name: str) -> Peer | None:
        """The server of that name."""
        return self._peers.get(name)

    def reload(self) -> None:
        """Read the file again. What cannot be used leaves them as they were."""
        try:
            self._peers = read_peers(self._path)
        except FieldOutOfRange as error:
            logger.error("%s; the peers stay as they were", error.message)
        else:
            logger.info("peers file %s: %d servers", self._path, len(self._peers))


def read_peers(path: Path) -> dict[str, Peer]:
    """The servers in the file. Raises `FieldOutOfRange`, which names what is wrong."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise _refusal(path, f"it has more than {MAX_BYTES >> 20} MiB")
        found = yaml.safe_load(text)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {explain(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _refusal(path, f"invalid YAML: {error}") from error
    if not isinstance(found, dict) or not found:
        raise _refusal(path, "it must have names of servers, each with its URL")
    return {str(name): _peer(path, name, url) for name, url in found.items()}


def _peer(path: Path, name: object, url: object) -> Peer:
    if not isinstance(name, str) or not REPLICA_NAME.fullmatch(name):
        raise _refusal(path, f"{name!r} is no name of a server: at most 16 of a-z and 0-9, a letter first")
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        is_good = parts.scheme == "http" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise _refusal(path, f"{name}: must be a URL such as http://10.0.0.1:8000, without a path; got {url!r}")
    return Peer(name, str(url).rstrip("/"))


def _refusal(path: Path, problem: str) -> FieldOutOfRange:
    return FieldOutOfRange(f"peers file {path}: {' '.join(problem.split())}", param="peers")
