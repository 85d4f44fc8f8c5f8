"""What replicas that one command starts know of each other: where each listens, and the key that they share."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from app.machine.files import make_private, make_private_folder

PEERS, KEY = "peers.json", "cluster.key"


def free_ports(host: str, count: int) -> list[int]:
    """Free ports of the address. A replica keeps its own when it is started again."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def acquaint(folder: Path, urls: Mapping[str, str]) -> dict[str, str]:
    """Write the files of the peers and, once, of the key to the folder; returns the settings that name them.

    `urls` are those of the replicas by name. Raises `OSError`.
    """
    make_private_folder(folder)
    peers, key = folder / PEERS, folder / KEY
    peers.write_text(json.dumps(dict(urls)), encoding="utf-8")
    if not key.exists():
        fresh = key.with_suffix(".new")  # one that is cut short by a crash must not become the key
        make_private(fresh)
        fresh.write_text(secrets.token_hex(32), encoding="utf-8")
        fresh.rename(key)
    return {"peers": str(peers), "cluster_key_file": str(key)}


def urls_of(host: str, names: Sequence[str], ports: Sequence[int]) -> dict[str, str]:
    """Where each replica listens, by name."""
    return {name: f"http://{host}:{port}" for name, port in zip(names, ports, strict=True)}
