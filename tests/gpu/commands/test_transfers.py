"""A session that one engine sends and another receives: the same tokens, its KV in place, or a reason why not."""

import socket
from pathlib import Path

import pytest

from app.domain.breakpoints import Action, Breakpoint, Edit, EditOp, When
from app.domain.errors import EngineError, WrongState
from app.domain.values import KVPolicy, Residency, SessionId
from app.messages import Arm, PublishKV, ReceiveKV, SendKV, SentKV
from app.model_store.resolve import ResolvedModel
from tests.gpu.driving import Driver, tcp_pair
from tests.gpu.tiny_engine import BLOCK, FULL, SLIDING, make_engine, make_windowed, model, prompt

__all__ = ["model"]

ID = SessionId("ses_a_1")
PROMPT = prompt(3, 3 * BLOCK + 2)


def make(model: ResolvedModel, host_blocks: int = 100, kv_dir: Path | None = None) -> Driver:
    return Driver(make_engine(model, host_blocks=host_blocks, policy=KVPolicy.SIGNAL, kv_dir=kv_dir))


def open_with_turn(driver: Driver) -> list[int]:
    """A session with a turn of 6 tokens; returns its history."""
    driver.open("t", ID)
    turn = driver.answer(ID, PROMPT, 6)
    return [*PROMPT, *driver.tokens(turn)]


def send(driver: Driver, connection: socket.socket) -> SentKV:
    sent = driver.do(SendKV(driver.ticket(), ID, driver.engine.give(connection)))
    assert isinstance(sent, SentKV)
    return sent


def receive(driver: Driver, connection: socket.socket, history: list[int], **asked: object) -> int:
    fields = {"tenant": "t", "residency": Residency.BEST_EFFORT, "interventions": (), "namespace": None, **asked}
    command = ReceiveKV(driver.ticket(), ID, driver.engine.give(connection), token_ids=tuple(history), **fields)  # type: ignore[arg-type]
    received = driver.do(command)
    assert isinstance(received, int)
    return received


def move(here: Driver, there: Driver, history: list[int], **asked: object) -> tuple[SentKV, int]:
    """The streams of the tests fit into the buffer of a socket."""
    out, into = tcp_pair()
    sent = send(here, out)
    return sent, receive(there, into, history, **asked)


def cached_of(driver: Driver, tenant: str) -> int:
    """Tokens of the prompt whose KV a new session of the tenant finds."""
    session = driver.open(tenant)
    asked = driver.answer(session, [*PROMPT, 1], 1)
    return driver.end(asked).usage.cached_tokens


def test_without_room_on_the_host_it_goes_to_disk(model: ResolvedModel, tmp_path: Path) -> None:
    here, there = make(model), make(model, host_blocks=2, kv_dir=tmp_path)
    history = open_with_turn(here)
    _, received = move(here, there, history)
    assert received == len(history) - 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{ID}.safetensors"]
    there.close(ID)
    there.move()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("layer_types", "blocks"), [([SLIDING, SLIDING], 5), ([SLIDING, FULL], 13 + 5)])
def test_of_layers_with_a_window_only_that_goes(tmp_path: Path, layer_types: list[str], blocks: int) -> None:
    model = make_windowed(tmp_path, "qwen3", layer_types, 4 * BLOCK)
    here, there = make(model), make(model)
    here.open("t", ID)
    asked = prompt(4, 12 * BLOCK)
    history = [*asked, *here.tokens(here.answer(ID, asked, 3))]
    sent, received = move(here, there, history)
    assert received == sent.computed_tokens == len(history) - 1
    assert blocks * here.placement.tiers.block_bytes < sent.bytes < (blocks + 1) * here.placement.tiers.block_bytes
    here_too, there_too = here.answer(ID, [5], 6), there.answer(ID, [5], 6)
    assert there.tokens(there_too) == here.tokens(here_too)
    assert there.end(there_too).usage.tokens_recomputed == 0
    there.check()


def test_another_history_than_was_told_of_is_refused(model: ResolvedModel) -> None:
    here, there = make(model), make(model)
    history = open_with_turn(here)
    with pytest.raises(EngineError, match="its history differs"):
        move(here, there, [*history[:-1], history[-1] ^ 1])


def test_what_does_not_come_whole_leaves_nothing(model: ResolvedModel) -> None:
    here, there = make(model), make(model)
    history = open_with_turn(here)
    out, into = tcp_pair()
    send(here, out)
    with into:
        whole = into.recv(1 << 20, socket.MSG_WAITALL)
    free = there.placement.tiers.cache.host.available
    for count in (0, 1, 8, 100, len(whole) - 1):
        out, into = tcp_pair()
        with out:
            out.sendall(whole[:count])
        with pytest.raises(EngineError, match="has not come"):
            receive(there, into, history)
        assert there.placement.tiers.cache.host.available == free
    out, into = tcp_pair()
    with out:
        out.sendall(whole)
    assert receive(there, into, history) == len(history) - 1


def test_captures_stay_so_the_session_does(model: ResolvedModel) -> None:
    here = make(model)
    here.open("t", ID)
    here.do(Arm(here.ticket(), ID, Breakpoint("bp_0", (0,), Action.CAPTURE, When())))
    here.answer(ID, PROMPT, 1)
    out, into = tcp_pair()
    with into:
        with pytest.raises(WrongState, match="has captures"):
            send(here, out)
        assert into.recv(1) == b"", "the connection is closed"


def test_steered_kv_stays_apart_where_it_goes(model: ResolvedModel) -> None:
    here, there = make(model), make(model)
    here.open("t", ID)
    edit = Edit(EditOp.SCALE, factor=2.0)
    here.do(Arm(here.ticket(), ID, Breakpoint("bp_0", (0,), Action.EDIT, When(), edits=(edit,))))
    turn = here.answer(ID, PROMPT, 6)
    made = here.end(turn).interventions
    assert made
    move(here, there, [*PROMPT, *here.tokens(turn)], interventions=made)
    assert [cached_of(there, tenant) for tenant in ("t", "other")] == [0, 0]


@pytest.mark.parametrize(("then", "cached"), [("waits", 0), ("closes", 0), ("is published", 3 * BLOCK)])
def test_its_prefix_serves_others_of_its_tenant_once_it_is_known_to_be_wanted(
    model: ResolvedModel, then: str, cached: int
) -> None:
    here, there = make(model), make(model)
    move(here, there, open_with_turn(here))
    if then == "closes":
        there.close(ID)
    elif then == "is published":
        there.do(PublishKV(there.ticket(), ID))
    assert [cached_of(there, tenant) for tenant in ("t", "other")] == [cached, 0]
