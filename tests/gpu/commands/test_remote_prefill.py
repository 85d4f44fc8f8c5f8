"""A prompt that one engine computes for another: the same tokens, and a turn that goes on whatever happens."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.domain.values import KVPolicy, SamplingParams, SessionId, StopRule, Ticket
from app.gpu.kv.stream import LEAD_BYTES
from app.messages import (
    Event,
    Lacking,
    ReceivedPrompt,
    ReceivePrompt,
    SendPrompt,
    SentKV,
    Submit,
)
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import GREEDY, Driver, tcp_pair
from tests.gpu.tiny_engine import BLOCK, FULL, SLIDING, make_engine, make_windowed, model, prompt

__all__ = ["model"]

ID, THERE = SessionId("ses_a_1"), SessionId("ses_b_1")
Connect = Callable[[], tuple[socket.socket, socket.socket]]
PROMPT = prompt(3, 12 * BLOCK + 2)


class Decoder(Driver):
    """An engine whose long prompts another one computes."""

    def __init__(self, model: ResolvedModel, host_blocks: int = 100) -> None:
        super().__init__(make_engine(model, host_blocks=host_blocks, policy=KVPolicy.SIGNAL))
        self.lacking: list[Lacking] = []

    def take(self, events: Sequence[Event]) -> None:
        self.lacking += [each for each in events if isinstance(each, Lacking)]
        super().take(events)

    def ask(self, token_ids: list[int], sampling: SamplingParams = GREEDY, apart_tokens: int = 2 * BLOCK) -> Ticket:
        """Begin a turn of 6 tokens in the session, which is opened."""
        if ID not in {each.session for each in self.handler.sequences}:
            self.open("t", ID)
        turn = Submit(self.ticket(), ID, tuple(token_ids), sampling, StopRule(6), apart_tokens=apart_tokens)
        self.take(self.engine.handle(turn))
        return turn.ticket

    def await_prompt(self, connection: socket.socket) -> Ticket:
        """Begin to receive the prompt that the last turn waits for."""
        (asked,) = self.lacking[-1:]
        ticket = self.ticket()
        number = self.engine.give(connection)
        self.take(self.engine.handle(ReceivePrompt(ticket, ID, asked.turn, number, asked.first)))
        return ticket

    def received(self, ticket: Ticket) -> ReceivedPrompt:
        self.move()
        self.take(self.handler.tick())
        value = self.events[ticket][-1].value  # type: ignore[union-attr]
        assert isinstance(value, ReceivedPrompt)
        return value


class Prefiller(Driver):
    """The other engine."""

    def __init__(self, model: ResolvedModel) -> None:
        super().__init__(make_engine(model, host_blocks=100, policy=KVPolicy.SIGNAL))

    def begin(self, token_ids: list[int], connection: socket.socket, first: int) -> Ticket:
        """Begin to compute the prompt but for its last token, and to send it."""
        self.open("t", THERE)
        self.turn = self.submit(THERE, token_ids[:-1], 0)
        ticket = self.ticket()
        self.take(self.engine.handle(SendPrompt(ticket, THERE, self.engine.give(connection), first)))
        return ticket

    def step(self) -> None:
        """One step, and all that it leads to."""
        self.take(self.engine.step())
        for _ in range(3):
            self.take(self.handler.tick())
            self.move()

    def send(self, token_ids: list[int], connection: socket.socket, first: int) -> SentKV:
        ticket = self.begin(token_ids, connection, first)
        while not self.ended(self.turn):
            self.step()
        self.close(THERE)
        value = self.events[ticket][-1].value  # type: ignore[union-attr]
        assert isinstance(value, SentKV)
        return value


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connections: the end that sends, and the one that receives."""
    with ExitStack() as ends:

        def make() -> tuple[socket.socket, socket.socket]:
            pair = tcp_pair()
            for end in pair:
                ends.callback(end.close)
            return pair

        yield make


def alone(model: ResolvedModel, token_ids: list[int]) -> list[int]:
    """What one engine says to this turn."""
    driver = Decoder(model)
    turn = driver.ask(token_ids, apart_tokens=0)
    driver.finish(turn)
    return driver.tokens(turn)


@pytest.mark.parametrize(("layer_types", "first", "blocks"), [([SLIDING, SLIDING], 8, 5), ([SLIDING, FULL], 0, 13 + 5)])
def test_of_layers_with_a_window_only_that_is_sent(
    connect: Connect, tmp_path: Path, layer_types: list[str], first: int, blocks: int
) -> None:
    model = make_windowed(tmp_path, "qwen3", layer_types, 4 * BLOCK)
    here, there = Decoder(model), Prefiller(model)
    turn = here.ask(PROMPT)
    assert [each.first for each in here.lacking] == [first], "of 13 blocks of each kind"
    out, into = connect()
    sent = there.send(PROMPT, out, first)
    assert sent.bytes == blocks * here.placement.tiers.block_bytes + LEAD_BYTES
    assert here.received(here.await_prompt(into)) == ReceivedPrompt(len(PROMPT) - 1 - first * BLOCK)
    here.finish(turn)
    assert here.end(turn).usage.cached_tokens == len(PROMPT) - 1
    assert here.tokens(turn) == alone(model, PROMPT)
    here.check()


def test_parts_go_as_they_are_computed(model: ResolvedModel, connect: Connect) -> None:
    there = Prefiller(model)
    out, into = connect()
    into.settimeout(5)
    there.begin(PROMPT, out, 0)
    arrived = []
    while not there.ended(there.turn):
        there.step()
        arrived.append(len(into.recv(1 << 22)))
    assert len(arrived) >= 3, "16 tokens a step"
    block = there.placement.tiers.block_bytes
    assert arrived[0] == 32 + 16 // BLOCK * block
    assert sum(arrived) == 32 + 13 * block
    assert into.recv(1) == b""
