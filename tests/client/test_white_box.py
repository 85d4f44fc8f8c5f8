"""Pauses, checkpoints, captures, steering and vectors: their numbers are for the engine's tests."""

from typing import Any

import numpy as np
import pytest

import client
from client import Djinn
from tests.client.conftest import GREEDY, PROMPT, paused


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
        shown: Any = session.info.checkpoint
        assert shown.model_copy(update={"age_s": checkpoint.info.age_s}) == checkpoint.info
        assert 0 <= shown.age_s <= checkpoint.info.age_s < 30
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
            checkpoint: Any = session.step(layer=layer).checkpoint
            assert (checkpoint.layer, checkpoint.end, checkpoint.breakpoint) == (layer, 20, None)
        turn = session.step()
        checkpoint = turn.checkpoint
        assert turn.token_ids == expected[:1]
        assert (checkpoint.layer, checkpoint.first, checkpoint.end) == (3, 20, 21)
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


def test_edits_can_come_with_the_resume(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with paused(djinn) as session, session.fork() as child:
        session.resume(until="end", edits=[{"scale": 0.5, "positions": "last"}, {"scale": 2.0, "positions": "last"}])
        child.resume(until="end", edits=[{"ablate": True}])
        assert session.history().token_ids[20:] == expected
        assert child.history().token_ids[20:] != expected


def test_captures_come_with_their_place(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        armed = session.capture_at(layers=[0, 3], position=7)
        session.capture_at(layer=1, when_pass="decode", every=2)
        session.generate(**GREEDY)
        found = session.captures()
        assert found.dropped == 0
        first = found.records[0]
        assert (first.breakpoint, first.layer, first.positions, first.token_ids) == (armed.id, 0, (7,), (PROMPT[7],))
        assert first.activation.shape == (1, 64)
        history = session.history().token_ids
        for record in found.records[2:]:
            assert record.layer == 1
            assert record.token_ids == tuple(history[position] for position in record.positions)
        assert [record.positions for record in found.records[2:]] == [(20,), (22,), (24,)]
        session.clear_captures()
        assert session.captures().records == ()


def test_maps_show_each_layer_that_was_captured(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        session.capture_at(layers=[0, 1, 2])
        session.break_at(layer=3)
        session.generate(**GREEDY)
        found = session.lens_map(positions=(4, 7), layers=[1, 3], top_k=2)
        assert (found.first, found.end, found.kept_first, found.kept_end) == (4, 7, 0, len(PROMPT))
        assert found.token_ids == tuple(PROMPT[4:7])
        assert [layer.layer for layer in found.layers] == [1, 3]
        single = session.checkpoint().lens(positions=(4, 7), top_k=2).positions
        assert found.layers[1].token_ids == tuple(tuple(guess.token_id for guess in each.top) for each in single)
        assert [found.texts[token] for token in found.layers[1].token_ids[0]] == [each.text for each in single[0].top]
        kept = {record.layer: record.activation for record in session.captures().records}
        djinn.vectors.put("compass", kept[0][5])
        lengths = session.norms(positions=(5, 6), vector="compass")
        assert lengths.layers[1].norms[0] == pytest.approx(float(np.linalg.norm(kept[1][5])), rel=1e-5)
        assert lengths.layers[0].cosines == pytest.approx((1.0,))
        djinn.vectors.delete("compass")


def test_steering_stays_until_it_is_removed(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with djinn.sessions.create() as session:
        steering = session.steer(layer=1, scale=0.1)
        assert [armed.info for armed in session.breakpoints()] == [steering.info]
        assert (steering.info.action, steering.info.edits[0].factor) == ("edit", 0.1)
        steered = session.generate(**GREEDY).token_ids
        steering.remove()
        steering.remove()
        session.rewind(0)
        assert session.generate(**GREEDY).token_ids == expected != steered
        session.break_at(layer=1)
        session.steer(layer=2, ablate=True)
        session.clear_breakpoints()
        assert session.breakpoints() == []
        session.rewind(0)
        assert session.generate(**GREEDY).token_ids == expected


def test_vectors(djinn: Djinn) -> None:
    vector = np.arange(64, dtype=np.float32)
    assert djinn.vectors.put("warm.v1", vector).size == 64
    try:
        assert [(found.name, found.dtype) for found in djinn.vectors.list()] == [("warm.v1", "float32")]
        np.testing.assert_array_equal(djinn.vectors.get("warm.v1"), vector)
        assert djinn.vectors.put("warm.v1", vector.astype(np.float16)).dtype == "float16"
        assert djinn.vectors.get("warm.v1").dtype == np.float16
        with paused(djinn) as session:
            session.checkpoint().edit(replace="warm.v1", positions="last")
            np.testing.assert_array_equal(session.checkpoint().read("last")[0], vector)
    finally:
        djinn.vectors.delete("warm.v1")
    with pytest.raises(client.NotFound):
        djinn.vectors.get("warm.v1")
    with pytest.raises(client.NotFound):
        djinn.vectors.delete("warm.v1")
