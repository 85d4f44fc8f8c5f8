"""What the ways of KV between servers carry: `python -m benchmarks.transports`. One process sends from its pool, and
another receives block by block, as for a prompt that is computed apart. The ways take turns.

`nixl, tcp` is NIXL where UCX may use nothing but TCP, as between machines without RDMA.
"""

import argparse
import multiprocessing
import os
import resource
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection

import torch

from app.gpu.kv.nixl import NixlAgent, NixlTransport
from app.gpu.kv.stream import OpenWay, SocketTransport
from benchmarks.command import bind_to_cores
from benchmarks.figures import Figure, figure_table
from benchmarks.spread import middle_half
from loadgen.processes.processor import NO_FLAGS, processor_flags
from loadgen.results.tables import to_markdown

WAYS = ("tcp", "nixl", "nixl, tcp")
BLOCK_BYTES = 720 << 10
"""Of 16 tokens of SmolLM2 in bfloat16, twice."""
PART_BLOCKS, PARTS = 32, 8
WHOLE_BYTES = PARTS * PART_BLOCKS * BLOCK_BYTES


def way_of(name: str, pool: torch.Tensor) -> OpenWay:
    """Opens such a way, with a pool that others may read from."""
    if name == "tcp":
        return SocketTransport
    if name == "nixl, tcp":
        os.environ["UCX_TLS"] = "tcp"
    return partial(NixlTransport, agent=NixlAgent(pool))


def send(name: str, port: Connection, times: int) -> None:
    """Send the pool so many times; then tell the seconds of processor time that it took."""
    pool = torch.full((WHOLE_BYTES,), 3, dtype=torch.uint8)
    opens = way_of(name, pool)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port.send(listening.getsockname()[1])
        way = opens(closing(listening.accept()[0]))
    began = cpu_s()
    for _ in range(times):
        for part in pool.view(PARTS, -1):
            way.send(part.numpy().data)
    port.send(cpu_s() - began)
    port.recv()
    way.end()


def receive(name: str, times: int) -> tuple[list[float], float]:
    """GB/s each time but the first, and milliseconds of processor time of both ends for a GB."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=send, args=(name, theirs, times))
    sender.start()
    pool = torch.zeros(WHOLE_BYTES, dtype=torch.uint8)
    opens = way_of(name, pool)
    way = opens(closing(socket.create_connection(("127.0.0.1", ours.recv()))))
    began, rates = cpu_s(), []
    for _ in range(times):
        start = time.perf_counter()
        for block in pool.view(-1, BLOCK_BYTES):
            way.receive(block.numpy().data)
        rates.append(WHOLE_BYTES / (time.perf_counter() - start) / 1e9)
    took_s = cpu_s() - began + ours.recv()
    assert bool((pool == 3).all())
    ours.send(None)
    sender.join()
    way.end()
    return rates[1:], 1e3 * took_s / (times * WHOLE_BYTES / 1e9)


def cpu_s() -> float:
    """Of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def round_of(name: str, times: int) -> tuple[list[float], float]:
    """`receive` in a process of its own: what UCX may use is settled once for each."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(receive, name, times).result()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each way, 2 or more; default 3")
    parser.add_argument("--times", type=int, default=8, help="that each sends 189 MB in a round; default 8")
    parser.add_argument("--cores", type=int, default=2, help="default 2")
    options = parser.parse_args()
    bind_to_cores(options.cores)
    rounds = [{name: round_of(name, options.times) for name in WAYS} for _ in range(options.rounds)]
    figures = []
    for name in WAYS:
        rates = [rate for each in rounds for rate in each[name][0]]
        figures.append(Figure(name, "GB/s", middle_half(rates)))
        figures.append(Figure(f"{name}, processor time", "ms/GB", middle_half([each[name][1] for each in rounds])))
    title = f"Ways between servers: {' '.join(processor_flags()) or NO_FLAGS}"
    print(to_markdown(figure_table(title, figures)))


if __name__ == "__main__":
    main()
