"""What goes wrong with breakpoints, and what a user is told."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import client
from client import Djinn
from tests.client.breakpoints.pausing import paused
from tests.serving import serve

ZEROS = np.zeros((20, 64), dtype=np.float32)


def test_what_needs_a_pause_is_a_conflict_without_one(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        for ask in (session.resume, session.step, session.checkpoint):
            with pytest.raises(client.Conflict, match="idle"):
                ask()
        with pytest.raises(client.Conflict, match="idle"), session.resume_stream():
            pytest.fail("a turn goes on that is not there")


def test_a_checkpoint_is_gone_when_the_turn_goes_on(djinn: Djinn) -> None:
    with paused(djinn) as session:
        checkpoint = session.checkpoint()
        session.resume(until="end")
        asks: list[Callable[[], object]] = [
            checkpoint.read,
            checkpoint.lens,
            lambda: checkpoint.write(ZEROS),
            lambda: checkpoint.edit(scale=0.9),
        ]
        for ask in asks:
            with pytest.raises(client.Conflict):
                ask()


def test_a_paused_session_takes_no_other_turn(djinn: Djinn) -> None:
    with paused(djinn) as session:
        with pytest.raises(client.Conflict, match="paused"):
            session.generate(prompt="x", max_tokens=1)
        with pytest.raises(client.Conflict, match="paused"):
            session.rewind(0)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        (ZEROS[:19], "shape"),
        (ZEROS[:, :63], "shape"),
        (ZEROS[None], "shape"),
        (0.0, "shape"),
        (np.where(ZEROS == 0, math.nan, 0), "activation"),
        (np.where(ZEROS == 0, math.inf, 0), "activation"),
        (np.where(ZEROS == 0, 1e39, 0), "activation"),
    ],
)
def test_what_cannot_take_the_place_of_a_checkpoint(djinn: Djinn, values: np.typing.ArrayLike, param: str) -> None:
    with paused(djinn) as session:
        checkpoint = session.checkpoint()
        before = checkpoint.read()
        with pytest.raises(client.Unprocessable) as refused:
            checkpoint.write(values)
        assert refused.value.param == param
        np.testing.assert_array_equal(checkpoint.read(), before)


def test_a_layer_that_is_not_there(djinn: Djinn) -> None:
    with djinn.sessions.create() as session, pytest.raises(client.Unprocessable, match="from 0 to 3") as refused:
        session.break_at(layer=4)
    assert refused.value.param == "layer"


def test_a_layer_that_the_pass_has_behind_it(djinn: Djinn) -> None:
    with paused(djinn, layer=2) as session:
        with pytest.raises(client.Unprocessable) as refused:
            session.step(layer=2)
        assert refused.value.param == "until.layer"
        assert session.step(layer=3).status == "paused"


def test_positions_that_are_not_in_the_checkpoint(djinn: Djinn) -> None:
    with paused(djinn) as session:
        checkpoint = session.checkpoint()
        with pytest.raises(client.Unprocessable, match="positions"):
            checkpoint.read((10, 21))
        with pytest.raises(client.Unprocessable, match="positions"):
            checkpoint.edit(scale=2.0, positions=(20, 21))


def test_a_vector_that_is_not_there(djinn: Djinn) -> None:
    with paused(djinn) as session:
        for ask in (
            lambda: session.steer(layer=1, add="nobody"),
            lambda: session.checkpoint().edit(add="nobody"),
            lambda: session.resume(edits=[{"add": "nobody"}]),
        ):
            with pytest.raises(client.NotFound, match="nobody") as missing:
                ask()
            assert missing.value.param is not None
            assert missing.value.param.endswith("vector")
        assert session.refresh().state == "paused"


@pytest.mark.parametrize("values", [np.zeros(63), np.zeros((1, 64)), [math.nan] * 64])
def test_what_cannot_be_a_vector(djinn: Djinn, values: np.typing.ArrayLike) -> None:
    with pytest.raises(client.Unprocessable):
        djinn.vectors.put("wrong", values)
    with pytest.raises(client.Unprocessable, match="name"):
        djinn.vectors.put("no/slash", np.zeros(64))
    assert djinn.vectors.list() == ()


def test_a_server_that_goes_away_during_a_pause() -> None:
    with Djinn("http://127.0.0.1") as nobody:
        with serve() as url, Djinn(url, timeout=30) as djinn:
            session = paused(djinn)
            info = session.refresh()
        session = client.Session(nobody.sessions._transport, info)
        with pytest.raises(client.ConnectionFailed):
            session.resume()
        with pytest.raises(client.ConnectionFailed):
            session.checkpoint()
