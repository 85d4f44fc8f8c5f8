"""What replicas that one command starts know of each other: where each listens, and the key that they share."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

PEERS, KEY = "peers.json", "cluster.key"
OWNER_ONLY = 0o600


def free_ports(host: str, count: int) -> list[int]:
    """Ports of the address that nobody listens on now. A replica keeps its own when it is started again."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((host, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def acquaint(folder: Path, urls: Mapping[str, str]) -> dict[str, str]:
    """Write the files of the peers and, once, of the key to the folder; returns the settings that name them.

    `urls` are those of the replicas by name. Raises `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    peers, key = folder / PEERS, folder / KEY
    peers.write_text(json.dumps(dict(urls)), encoding="utf-8")
    if not key.exists():
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
    return {"peers": str(peers), "cluster_key_file": str(key)}


def urls_of(host: str, names: Sequence[str], ports: Sequence[int]) -> dict[str, str]:
    """Where each replica listens, by name."""
    return {name: f"http://{host}:{port}" for name, port in zip(names, ports, strict=True)}
