"""What a session's move to another server costs: `python -m benchmarks.move`. Both servers are on this machine.

A move is compared with a plain copy of as many bytes over a TCP connection between two processes, in turn. The first
token after it is compared with that of a server which has to compute the history. The session waits for a tool when it
moves: its KV is in host memory, and there is host memory for few sessions. So all of it has been touched before: the
machine gives new memory page by page, which takes several times as long as the copy.
"""

import argparse
import multiprocessing
import socket
import time
from random import Random

import httpx

from benchmarks.command import bind_to_cores
from benchmarks.measuring import middle_half, ratio_of_medians
from benchmarks.replicas import greedy, open_session, random_prompt, replicas
from loadgen.report.tables import Figure, Target, figure_table, to_markdown

LENGTHS = (64, 128, 256, 512, 1024)
NAMES = ("a", "b")
MOST = Target(1.5)
KV_HOST = "96MiB"
"""For two sessions of 1,024 tokens: the third has memory that others have had."""
TOUCHING = 3
"""Sessions of the longest length that move first, so that all of it has been touched."""


def parked_session(http: httpx.Client, tokens: int, random: Random) -> str:
    """A session with that much history, whose KV is in host memory."""
    session = open_session(http)
    first_token_s(http, session, random_prompt(random, tokens - 1))
    http.post(f"{session}/phase", json={"phase": "io_wait"}).raise_for_status()
    while http.get(session).json()["kv"]["tier"] != "host":
        time.sleep(0.01)
    return session


def first_token_s(http: httpx.Client, session: str, token_ids: list[int]) -> float:
    """Seconds of a turn of one token."""
    began = time.perf_counter()
    http.post(f"{session}/generate", json=greedy(token_ids, 1)).raise_for_status()
    return time.perf_counter() - began


def move(http: httpx.Client, session: str, there: str) -> tuple[float, int]:
    """Seconds of a move, as its caller sees it, and the bytes that were sent."""
    began = time.perf_counter()
    answer = http.post(f"{session}/move", json={"replica": there}).raise_for_status().json()
    return time.perf_counter() - began, answer["bytes"]


def _receive(port: int, count: int) -> None:
    """In another process: the other end of a copy, which says when all has come."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        target = memoryview(bytearray(count))
        connection.sendall(b"r")
        rest = target
        while rest:
            rest = rest[connection.recv_into(rest) :]
        connection.sendall(b"d")


def copy_s(count: int) -> float:
    """Seconds of a plain copy of so many bytes from one process to another, both memories touched before."""
    source = bytes(count)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = multiprocessing.get_context("fork").Process(target=_receive, args=(port, count))
        process.start()
        with server.accept()[0] as connection:
            connection.recv(1)
            began = time.perf_counter()
            connection.sendall(source)
            connection.recv(1)
            seconds = time.perf_counter() - began
        process.join()
    return seconds


def touch(clients: dict[str, httpx.Client]) -> None:
    """Have sessions move that need all host memory together."""
    for number in range(TOUCHING):
        session = parked_session(clients["a"], max(LENGTHS), Random(-number))
        move(clients["a"], session, "b")
        clients["b"].delete(session).raise_for_status()


def measure(clients: dict[str, httpx.Client], tokens: int, rounds: int) -> list[Figure]:
    """The lines of one length."""
    moves, copies, warm, cold = list[float](), list[float](), list[float](), list[float]()
    random = Random(tokens)
    for number in range(-1, rounds):  # the first is not counted
        session = parked_session(clients["a"], tokens, random)
        seconds, count = move(clients["a"], session, "b")
        copied = copy_s(count)
        again = first_token_s(clients["b"], session, [5])
        fresh = open_session(clients["b"])
        computed = first_token_s(clients["b"], fresh, random_prompt(random, tokens))
        for each in (session, fresh):
            clients["b"].delete(each).raise_for_status()
        if number >= 0:
            for values, value in zip((moves, copies, warm, cold), (seconds, copied, again, computed), strict=True):
                values.append(value)
    label = f"{tokens} tokens, {count / 2**20:.1f} MiB"
    together = [first + second for first, second in zip(moves, warm, strict=True)]
    return [
        Figure(f"{label}: move", "ms", middle_half([1e3 * value for value in moves])),
        Figure(f"{label}: plain copy", "ms", middle_half([1e3 * value for value in copies])),
        Figure(f"{label}: move / copy", "×", ratio_of_medians(moves, copies), MOST if tokens == max(LENGTHS) else None),
        Figure(f"{label}: move and first token / computed", "×", ratio_of_medians(together, cold)),
        Figure(f"{label}: computed", "ms", middle_half([1e3 * value for value in cold])),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.move", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="default smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=20, help="of each length; default 20")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of histories")
    parser.add_argument("--cores", type=int, default=2, help="default 2")
    options = parser.parse_args()
    bind_to_cores(options.cores)
    with replicas(options.model, {name: {"--kv-host": KV_HOST} for name in NAMES}, alone=True) as clients:
        touch(clients)
        figures = [figure for tokens in options.tokens for figure in measure(clients, tokens, options.rounds)]
    print(to_markdown(figure_table(f"A move: {options.model}", figures)))


if __name__ == "__main__":
    main()
