"""Ways on which KV goes between servers: each brings what was sent, or says that it does not."""

from __future__ import annotations

import functools
import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.gpu.kv import stream
from app.gpu.kv.nixl import AGENT, HEAD, MEMORY, WINDOW_BYTES, NixlAgent, NixlTransport
from app.gpu.kv.stream import OpenWay, SocketTransport
from tests.gpu.driving import tcp_pair
from tests.nixl import NEEDS_NIXL, needs_nixl
from tests.waiting import wait_until

POOL_BYTES = 3 * WINDOW_BYTES
KINDS = ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)]
SOON_S = 30.0
POOL = torch.randint(256, (POOL_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@functools.cache
def sends(kind: str) -> OpenWay:
    return SocketTransport if kind == "tcp" else functools.partial(NixlTransport, agent=NixlAgent(POOL))


@functools.cache
def receives(kind: str) -> OpenWay:
    return SocketTransport if kind == "tcp" else functools.partial(NixlTransport, agent=NixlAgent(None))


@contextmanager
def ways(kind: str) -> Iterator[tuple[SocketTransport, SocketTransport]]:
    there, here = tcp_pair()
    sender, receiver = sends(kind)(closing(there)), receives(kind)(closing(here))
    try:
        yield sender, receiver
    finally:
        sender.end()
        receiver.end()


def _beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


SPANS = st.lists(
    st.one_of(
        st.binary(max_size=100),
        st.tuples(st.integers(0, POOL_BYTES), st.integers(0, POOL_BYTES)).map(lambda ends: slice(*sorted(ends))),
    ),
    max_size=4,
)
"""Of the pool, or of other memory."""


@pytest.mark.parametrize("kind", KINDS)
@given(spans=SPANS, shares=st.lists(st.floats(0, 1), max_size=4))
def test_what_was_sent_comes_in_any_parts(kind: str, spans: list[bytes | slice], shares: list[float]) -> None:
    sent = [POOL[each].numpy().data if isinstance(each, slice) else memoryview(each) for each in spans]
    whole = b"".join(sent)
    came = bytearray(len(whole))
    cuts = [0, *sorted(int(share * len(whole)) for share in shares), len(whole)]
    with ways(kind) as (sender, receiver):

        def send() -> None:
            for span in sent:
                sender.send(span)

        thread = _beside(send)
        for first, end in pairwise(cuts):
            receiver.receive(memoryview(came)[first:end])
        thread.join()
    assert came == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_goes_away_is_seen(kind: str) -> None:
    with ways(kind) as (sender, receiver):
        thread = _beside(lambda: sender.send(POOL[: 2 * WINDOW_BYTES].numpy().data))
        receiver.receive(memoryview(bytearray(2 * WINDOW_BYTES)))
        thread.join()
        assert not sender.is_gone()
        receiver.end()
        wait_until(sender.is_gone)
        with pytest.raises(OSError, match=r"peer|pipe|closed"):
            sender.send(POOL.numpy().data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_goes_away_is_seen(kind: str) -> None:
    with ways(kind) as (sender, receiver):
        sender.end()
        with pytest.raises(ConnectionError, match="closed the connection before all had come"):
            receiver.receive(memoryview(bytearray(1)))


def says_of_memory(agent: NixlAgent, address: int) -> bytes:
    """Who the sender is, and that 100 bytes are at that address of its memory."""
    return HEAD.pack(AGENT, len(agent.metadata), 0) + agent.metadata + HEAD.pack(MEMORY, 100, address)


@contextmanager
def after(said: bytes) -> Iterator[SocketTransport]:
    """The end that receives over NIXL from a sender that has said this, and then is silent."""
    ours, theirs = tcp_pair()
    receiver = receives("nixl")(closing(theirs))
    with ours:
        ours.sendall(said)
        yield receiver
    receiver.end()


@needs_nixl
def test_memory_that_was_let_go_as_it_was_read_does_not_count() -> None:
    ours, theirs = tcp_pair()
    receiver = receives("nixl")(closing(theirs))
    agent = NixlAgent(POOL)
    target = bytearray(100)

    def let_go() -> None:
        with ours:
            ours.sendall(says_of_memory(agent, POOL.data_ptr()))
            while not select.select([ours], [], [], 0)[0]:
                agent.progress()

    thread = _beside(let_go)
    with pytest.raises(ConnectionError, match=r"closed the connection|reset"):
        receiver.receive(memoryview(target))
    thread.join()
    assert not any(target)
    receiver.end()


@needs_nixl
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not send prompts as this one does"),
        (HEAD.pack(AGENT, 1 << 40, 0), "says too much"),
        (HEAD.pack(AGENT, 3, 0) + b"abc", "NIXL cannot reach"),
        (HEAD.pack(MEMORY, 100, 0), "NIXL cannot read"),
        (HEAD.pack(7, 100, 0), "does not send prompts as this one does"),
    ],
)
def test_what_no_sender_says_is_refused(said: bytes, why: str) -> None:
    with after(said) as receiver, pytest.raises(ConnectionError, match=why):
        receiver.receive(memoryview(bytearray(1)))


@needs_nixl
def test_no_address_outside_the_senders_pool_is_asked_for() -> None:
    agent = NixlAgent(POOL)
    with (
        after(says_of_memory(agent, POOL.data_ptr() - 4096)) as receiver,
        pytest.raises(ConnectionError, match="NIXL cannot read"),
    ):
        receiver.receive(memoryview(bytearray(1)))


@needs_nixl
def test_a_sender_that_is_frozen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PATIENCE_S", 0.3)
    agent = NixlAgent(POOL)
    with (
        after(says_of_memory(agent, POOL.data_ptr())) as receiver,
        pytest.raises(ConnectionError, match="was not read in time"),
    ):
        receiver.receive(memoryview(bytearray(1)))


def _say_and_freeze(port: int) -> None:
    """Another process: say where its memory is, and serve no read."""
    agent = NixlAgent(POOL)
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.sendall(says_of_memory(agent, POOL.data_ptr()))
        time.sleep(SOON_S)


@needs_nixl
@pytest.mark.long
def test_after_a_sender_that_dies_as_it_is_read_others_are_read() -> None:
    agent = NixlAgent(None)
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            sender = context.Process(target=_say_and_freeze, args=(listening.getsockname()[1],))
            sender.start()
            receiver = NixlTransport(closing(listening.accept()[0]), agent)
        threading.Timer(0.5, sender.kill).start()
        with pytest.raises(ConnectionError, match=r"has gone away|cannot (be )?read"):
            receiver.receive(memoryview(bytearray(1)))
        receiver.end()
        sender.join()
    there, here = tcp_pair()
    other, receiver = sends("nixl")(closing(there)), NixlTransport(closing(here), agent)
    came = bytearray(POOL_BYTES)
    thread = _beside(lambda: other.send(POOL.numpy().data))
    receiver.receive(memoryview(came))
    thread.join()
    assert came == POOL.numpy().data
    other.end()
    receiver.end()


@needs_nixl
def test_two_senders_are_read_at_once() -> None:
    with ways("nixl") as (first, first_here), ways("nixl") as (second, second_here):
        came = bytearray(POOL_BYTES), bytearray(POOL_BYTES)
        threads = [_beside(functools.partial(end.send, POOL.numpy().data)) for end in (first, second)]
        threads += [
            _beside(functools.partial(end.receive, memoryview(into)))
            for end, into in zip((first_here, second_here), came, strict=True)
        ]
        for thread in threads:
            thread.join()
        assert came[0] == came[1] == POOL.numpy().data
