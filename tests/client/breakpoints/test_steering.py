"""Captures, steering and vectors."""

from __future__ import annotations

import numpy as np
import pytest

import client
from client import Djinn
from tests.client.breakpoints.pausing import GREEDY, PROMPT, paused


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


def test_a_capture_is_what_a_pause_shows(djinn: Djinn) -> None:
    with djinn.sessions.create() as session:
        session.capture_at(layer=1)
        session.break_at(layer=1)
        session.generate(**GREEDY)
        (record,) = session.captures().records
        np.testing.assert_array_equal(record.activation, session.checkpoint().read())


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


def test_all_breakpoints_can_go_at_once(djinn: Djinn, expected: tuple[int, ...]) -> None:
    with djinn.sessions.create() as session:
        session.break_at(layer=1)
        session.steer(layer=2, ablate=True)
        session.clear_breakpoints()
        assert session.breakpoints() == []
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


def test_a_breakpoint_keeps_a_vector_that_is_deleted(djinn: Djinn) -> None:
    djinn.vectors.put("brief", np.ones(64))
    with djinn.sessions.create() as session:
        steering = session.steer(layer=0, add="brief")
        djinn.vectors.delete("brief")
        capture = session.capture_at(layer=2, when_pass="decode")
        assert [armed.id for armed in session.breakpoints()] == [steering.id, capture.id]
        session.generate(**GREEDY)
        assert {record.breakpoint for record in session.captures().records} == {capture.id}
