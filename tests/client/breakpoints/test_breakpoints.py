"""Pauses and checkpoints; the numbers themselves are for the engine's tests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from client import Djinn
from tests.client.breakpoints.pausing import GREEDY, PROMPT, paused
from tests.serving import serve


def test_a_pause_in_every_pass_changes_nothing(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with djinn.sessions.create() as session:
        breakpoint = session.break_at(layer=2)
        turn = session.generate(**GREEDY)
        passes: list[tuple[str, int, int]] = []
        while turn.checkpoint is not None:
            assert (turn.status, turn.finish_reason, turn.checkpoint.layer) == ("paused", None, 2)
            assert turn.checkpoint.breakpoint == breakpoint.id
            assert turn.token_ids == expected[: len(passes)]
            passes.append((turn.checkpoint.in_pass, turn.checkpoint.first, turn.checkpoint.end))
            turn = session.resume()
    assert (turn.status, turn.finish_reason, turn.token_ids) == ("finished", "length", expected)
    assert passes == [("prefill", 0, 20), *(("decode", at, at + 1) for at in range(20, 25))]


def test_what_is_where_the_session_is_paused(djinn: Djinn) -> None:
    with paused(djinn) as session:
        assert session.refresh().state == "paused"
        checkpoint = session.checkpoint()
        assert session.info.checkpoint is not None
        assert session.info.checkpoint.model_copy(update={"age_s": checkpoint.info.age_s}) == checkpoint.info
        assert 0 <= session.info.checkpoint.age_s <= checkpoint.info.age_s < 30
        assert (checkpoint.layer, checkpoint.first, checkpoint.end) == (1, 0, 20)
        activation = checkpoint.read()
        assert activation.shape == checkpoint.shape == (20, checkpoint.info.hidden_size)
        assert activation.dtype == np.float32
        np.testing.assert_array_equal(checkpoint.read("last"), activation[-1:])
        np.testing.assert_array_equal(checkpoint.read((3, 7)), activation[3:7])


def test_what_is_written_is_there_and_what_is_put_back_changes_nothing(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with paused(djinn) as session:
        checkpoint = session.checkpoint()
        before = checkpoint.read()
        checkpoint.write(2 * before.astype(np.float64))
        np.testing.assert_array_equal(checkpoint.read(), 2 * before)
        checkpoint.write(before)
        assert session.resume(until="end").token_ids == expected


def test_edits_are_made_on_the_server(djinn: Djinn) -> None:
    with paused(djinn) as session:
        checkpoint = session.checkpoint()
        before = checkpoint.read()
        checkpoint.edit(scale=0.5)
        np.testing.assert_array_equal(checkpoint.read(), 0.5 * before)
        checkpoint.edit(add=np.ones(before.shape[1]), factor=2.0, positions=(0, 1))
        np.testing.assert_allclose(checkpoint.read()[0], 0.5 * before[0] + 2, rtol=1e-6)
        np.testing.assert_array_equal(checkpoint.read()[1:], 0.5 * before[1:])
        checkpoint.edit(ablate=True, positions="last")
        assert not checkpoint.read("last").any()


def test_the_lens_after_the_last_layer_says_what_the_model_says(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with paused(djinn, layer=3) as session:
        lens = session.checkpoint().lens(top_k=3)
        (last,) = lens.positions
        assert (lens.layer, last.position, last.token_id) == (3, 19, PROMPT[-1])
        assert last.top[0].token_id == expected[0]
        logprobs = [guess.logprob for guess in last.top if guess.logprob is not None]
        assert len(logprobs) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        everywhere = session.checkpoint().lens(top_k=1, positions="all").positions
        assert [place.token_id for place in everywhere] == PROMPT


def test_stepping_layer_by_layer_and_token_by_token(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with paused(djinn, layer=0, once=True) as session:
        assert session.breakpoints() == []
        for layer in (1, 3):
            checkpoint = session.step(layer=layer).checkpoint
            assert checkpoint is not None
            assert (checkpoint.layer, checkpoint.end, checkpoint.breakpoint) == (layer, 20, None)
        turn = session.step()
        assert turn.token_ids == expected[:1]
        assert turn.checkpoint is not None
        assert (turn.checkpoint.layer, turn.checkpoint.first, turn.checkpoint.end) == (3, 20, 21)
        assert session.resume().token_ids == expected


def test_a_resumed_turn_can_be_streamed(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with djinn.sessions.create() as session:
        session.break_at(layer=1, when_pass="decode", position=22)
        with session.stream(**GREEDY) as stream:
            seen = [token for event in stream for token in event.token_ids]
        assert (stream.turn.status, stream.turn.token_ids, tuple(seen)) == ("paused", expected[:3], expected[:3])
        with session.resume_stream() as stream:
            rest = [token for event in stream for token in event.token_ids]
    assert tuple(rest) == expected[3:]
    assert (stream.turn.status, stream.turn.token_ids) == ("finished", expected)


def test_leaving_a_resumed_stream_cancels_the_turn(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        session.break_at(layer=1, once=True)
        session.generate(token_ids=PROMPT, max_tokens=900, ignore_eos=True)
        with session.resume_stream() as stream:
            next(iter(stream))
        deadline = time.monotonic() + 10
        while session.refresh().state != "idle":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert session.info.tokens < 900


def test_edits_can_come_with_the_resume(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with paused(djinn) as session, session.fork() as child:
        session.resume(until="end", edits=[{"scale": 0.5, "positions": "last"}, {"scale": 2.0, "positions": "last"}])
        child.resume(until="end", edits=[{"ablate": True}])
        assert session.history().token_ids[20:] == expected
        assert child.history().token_ids[20:] != expected


def test_forks_are_paused_in_the_same_place(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with paused(djinn) as session, session.fork() as child:
        assert child.info.state == "paused"
        assert [armed.id for armed in child.breakpoints()] == [armed.id for armed in session.breakpoints()]
        np.testing.assert_array_equal(child.checkpoint().read(), session.checkpoint().read())
        session.checkpoint().edit(ablate=True)
        assert child.resume(until="end").token_ids == expected
        assert session.cancel().state == "idle"


@pytest.mark.parametrize(("on_timeout", "reason"), [("resume", "length"), ("abort", "cancelled")])
def test_a_pause_that_nobody_ends_ends_by_itself(djinn: Djinn, on_timeout: Any, reason: str) -> None:
    with djinn.sessions.create() as session:
        session.break_at(layer=1, when_pass="prefill", timeout_s=0.2, on_timeout=on_timeout)
        session.generate(**GREEDY)
        deadline = time.monotonic() + 10
        while session.refresh().state != "idle":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert session.info.tokens == (26 if reason == "length" else 20)


def test_a_model_in_bfloat16_is_read_and_written_in_float32() -> None:
    with serve(dtype="bfloat16") as url, Djinn(url, timeout=30) as djinn, djinn.sessions.create() as session:
        whole = session.generate(**GREEDY).token_ids
        with paused(djinn) as other:
            checkpoint = other.checkpoint()
            assert checkpoint.info.dtype == "bfloat16"
            activation = checkpoint.activation
            assert activation.dtype == np.float32
            checkpoint.write(activation)
            np.testing.assert_array_equal(checkpoint.activation, activation)
            assert other.resume(until="end").token_ids == whole
