"""Servers of one cluster, all on this machine, for measurements of what goes between them."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import httpx

from app.cluster.key import ClusterKey
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.process import free_port, running_server

KEY = "a key of servers that live for some minutes"
WAIT_S = 600


@contextmanager
def replicas(
    model: str, flags: Mapping[str, Mapping[str, str]], *, cores: Sequence[int] = (), alone: bool = False
) -> Iterator[dict[str, httpx.Client]]:
    """Servers that know each other, by name, with flags of their own. With `cores` each has one to itself. `alone`: a
    client's requests are not sent on, as if the other server had sent them.
    """
    with ExitStack() as stack:
        folder, clients = Path(stack.enter_context(tempfile.TemporaryDirectory())), dict[str, httpx.Client]()
        (folder / "key").write_text(KEY)
        cluster = {"--cluster": f"folder:{folder}", "--cluster-key-file": str(folder / "key"), "--model": model}
        for number, (name, own) in enumerate(flags.items()):
            port = free_port()
            launch = djinn_launch(
                {**cluster, "--replica": name, "--port": f"{port}", "--state-dir": str(folder / name), **own}
            )
            command, url = launch.command, f"http://127.0.0.1:{port}"
            command = ["taskset", "-c", str(cores[number]), *command] if cores else command
            stack.enter_context(running_server(command, launch.environment, url))
            hop = f"benchmark {ClusterKey(KEY.encode()).sign(b'hop', b'benchmark', name.encode())}"
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            headers = {"Djinn-Hop": hop} if alone else {}
            client = httpx.Client(base_url=url, timeout=WAIT_S, headers=headers, limits=limits)
            clients[name] = stack.enter_context(client)
        yield clients


def open_session(http: httpx.Client) -> str:
    """Its path."""
    return f"/v1/sessions/{http.post('/v1/sessions', json={}).raise_for_status().json()['id']}"


def greedy(token_ids: list[int], max_tokens: int) -> dict[str, object]:
    """The body of a turn of exactly so many tokens."""
    return {"token_ids": token_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def random_prompt(random: Random, count: int) -> list[int]:
    """Tokens that nobody has had; every vocabulary has them."""
    return [random.randrange(16, 250) for _ in range(count)]
