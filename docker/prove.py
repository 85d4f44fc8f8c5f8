"""Prove that the image works: its server answers, drains at SIGTERM with status 0, and survives `kill -9`.

`docker/build-here.sh` calls this with the image's configuration and a command that runs another command in a container.
The container's processes must be this machine's, as with buildah's chroot isolation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

START_S = 300
"""The first start compiles kernels."""
END_S = 60
TINY = ["--model", "random:tiny-llama", "--kv-device", "64MiB"]
URL = f"http://127.0.0.1:{os.environ['DJINN_PORT']}"
WRITABLE = ("/var/lib/djinn", "/var/cache/djinn", "/tmp", "/proc", "/sys", "/dev", "/run", "/etc")
"""Where files may change: the volumes, and what the engine of containers makes."""


class Server:
    """The image's own command in a container, from the start to the end of the `with` block."""

    def __init__(self, run: list[str], image: dict[str, Any]) -> None:
        self._command = [*run, *image["Entrypoint"], *image["Cmd"], *TINY]

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit("the server did not start")
            time.sleep(0.2)
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()

    def terminate(self) -> None:
        """What a container's engine does to stop it: SIGTERM to the container's first process."""
        first = next(pid for pid in self._descendants() if Path(f"/proc/{pid}/comm").read_text().strip() == "tini")
        os.kill(first, signal.SIGTERM)

    def kill(self) -> None:
        """What the kernel does when memory is short: none of its processes has another word to say."""
        for pid in self._descendants():
            os.kill(pid, signal.SIGKILL)
        self._process.wait(END_S)

    def status(self) -> int:
        """The exit status, once it has ended."""
        return self._process.wait(END_S)

    def _answers(self) -> bool:
        try:
            return ask("GET", "/ready")["status"] == "ready"
        except OSError:
            return False

    def _descendants(self) -> list[int]:
        parents = dict(_parents())

        def is_ours(pid: int) -> bool:
            while pid in parents:
                pid = parents[pid]
                if pid == self._process.pid:
                    return True
            return False

        return [pid for pid in parents if is_ours(pid)]


def _parents() -> Iterator[tuple[int, int]]:
    """Each process, and its parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended


def ask(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of an answer. Raises OSError for any but a good one."""
    content = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer proof", "Content-Type": "application/json"}
    with urlopen(Request(URL + path, content, headers, method=method), timeout=60) as answer:
        return json.load(answer)


def turn(session: str, **more: Any) -> Any:
    """A turn of 16 tokens."""
    body = {"token_ids": [5, 6, 7], "max_tokens": 16, "ignore_eos": True, **more}
    return ask("POST", f"/v1/sessions/{session}/generate", body)


def stream(session: str) -> Iterator[str]:
    """The names of a long turn's events, as they come."""
    body = {"token_ids": [8], "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer proof", "Content-Type": "application/json"}
    request = Request(f"{URL}/v1/sessions/{session}/generate", json.dumps(body).encode(), headers, method="POST")
    with urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"event:"):
                yield line.partition(b":")[2].strip().decode()


def tokens_of(session: str) -> int:
    """How long the session's history is."""
    return int(ask("GET", f"/v1/sessions/{session}")["tokens"])


def check(what: str, holds: bool) -> None:
    """Say whether it holds, and end if it does not."""
    print(f"{'yes' if holds else 'NO'}: {what}", flush=True)
    if not holds:
        sys.exit(1)


def prove(run: list[str], image: dict[str, Any], root: Path) -> None:
    """Start the image's server three times, and end it in three ways."""
    began = time.time()
    with Server(run, image) as server:
        session = ask("POST", "/v1/sessions")["id"]
        check("a turn has its tokens", len(turn(session)["token_ids"]) == 16)
        healthy = subprocess.run([*run, *image["Healthcheck"]["Test"][1:]], check=False).returncode == 0
        check("the health check passes", healthy)
        events = stream(session)
        next(events)
        server.terminate()
        check("a turn that runs at SIGTERM comes to its end", list(events)[-1] == "finished")
        check("the exit status after SIGTERM is 0", server.status() == 0)
    with Server(run, image) as server:
        kept = tokens_of(session)
        check("another container with the volume has the session", kept == 3 + 16 + 1 + 400)
        turn(session)
        server.kill()
    with Server(run, image):
        check("after kill -9 the finished turn is still there", tokens_of(session) == kept + 3 + 16)
        check("and the session goes on", len(turn(session)["token_ids"]) == 16)
    changed = [
        path
        for path in root.rglob("*")
        if not str(path).removeprefix(str(root)).startswith(WRITABLE)
        and path.is_file()
        and not path.is_symlink()
        and path.stat().st_mtime > began
    ]
    check("nothing was written outside the volumes, /tmp, and where the engine of containers writes too", not changed)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, required=True, help="what `buildah inspect` says of it")
    parser.add_argument("--root", type=Path, required=True, help="the container's root, as this machine sees it")
    parser.add_argument("run", nargs="+", help="the command that runs another one in a container")
    arguments = parser.parse_args()
    image = json.loads(arguments.image.read_text())["Docker"]["config"]
    prove(arguments.run, image, arguments.root)


if __name__ == "__main__":
    main()
