"""A real etcd on loopback, which can be killed and started again. Debian's package `etcd-server` has it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.pair import free_port
from tests.waiting import wait_until

SOON_S = 30


class Program:
    """One that can be killed and started again."""

    def __init__(self, log: Path, *command: str, **environment: str) -> None:
        self.log, self._command, self._environment = log, command, {**os.environ, **environment}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)

    def kill(self) -> None:
        """`kill -9`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Etcd(Program):
    """One server, whose data outlives it."""

    def __init__(self, folder: Path, port: int, peer_port: int, *flags: str) -> None:
        self.host = f"127.0.0.1:{port}"
        self.url = f"etcd://{self.host}"
        scheme = "https" if "--cert-file" in flags else "http"
        self._client = httpx.Client(base_url=f"{scheme}://{self.host}", verify=False, timeout=10)
        client, peer = f"{scheme}://{self.host}", f"http://127.0.0.1:{peer_port}"
        command = f"etcd --unsafe-no-fsync --listen-client-urls {client} --advertise-client-urls {client}"
        command += f" --listen-peer-urls {peer} --initial-advertise-peer-urls {peer} --initial-cluster default={peer}"
        log = folder.with_name(f"{folder.name}.log")
        super().__init__(log, *command.split(), "--data-dir", str(folder), *flags)

    def start(self) -> None:
        super().start()
        wait_until(self._answers, SOON_S)

    def ask(self, path: str, **body: object) -> dict[str, object]:
        """What only an operator asks for."""
        found: dict[str, object] = self._client.post(f"/v3/{path}", json=body).raise_for_status().json()
        return found

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
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
