"""A real etcd on loopback, which can be killed and started again. Debian's package `etcd-server` has it."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.pair import free_port
from tests.waiting import wait_until

SOON_S = 30


class Etcd:
    """One server, whose data outlives it."""

    def __init__(self, folder: Path, port: int, peer_port: int, *flags: str) -> None:
        self.host = f"127.0.0.1:{port}"
        self.url = f"etcd://{self.host}"
        scheme = "https" if "--cert-file" in flags else "http"
        self._client = httpx.Client(base_url=f"{scheme}://{self.host}", verify=False, timeout=1)
        self._log = folder.with_name(f"{folder.name}.log")
        peer = f"http://127.0.0.1:{peer_port}"
        self._command: Sequence[str] = [
            *("etcd", "--data-dir", str(folder), "--unsafe-no-fsync"),
            *("--listen-client-urls", f"{scheme}://{self.host}", "--advertise-client-urls", f"{scheme}://{self.host}"),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            ),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._answers, SOON_S)

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, path: str, **body: object) -> dict[str, object]:
        """What only an operator asks for."""
        found: dict[str, object] = self._client.post(f"/v3/{path}", json=body).raise_for_status().json()
        return found

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return bool(self._client.get("/health").json()["health"] == "true")
        except httpx.TransportError:
            return False


@contextmanager
def running_etcd(folder: Path, *flags: str) -> Iterator[Etcd]:
    """One that runs. Skips the test where there is none on this machine."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    found = Etcd(folder, free_port(), free_port(), *flags)
    try:
        found.start()
        yield found
    finally:
        found.kill()
        found._client.close()
