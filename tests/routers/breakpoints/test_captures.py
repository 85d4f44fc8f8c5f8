"""What breakpoints record while the turn goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from tests.routers.breakpoints.pausing import HIDDEN, TURN, arm, generate, pause, read, unbroken

Entry = tuple[dict[str, Any], NDArray[np.float32]]


def captures(http: httpx.Client, session: str, tmp_path: Path) -> tuple[list[Entry], dict[str, str]]:
    """What was recorded, by name, each with what the file says of it; and the file's metadata."""
    answer = http.get(f"{session}/captures").raise_for_status()
    assert answer.headers["content-type"] == "application/octet-stream"
    (tmp_path / "captures").write_bytes(answer.content)
    with safe_open(tmp_path / "captures", "numpy") as file:
        metadata = file.metadata()
        return [(json.loads(metadata[name]), file.get_tensor(name)) for name in sorted(file.keys())], metadata


def test_every_pass_is_recorded_and_the_turn_is_as_ever(http: httpx.Client, session: str, tmp_path: Path) -> None:
    armed = arm(http, session, layers=[0, 2], action="capture")
    token_ids = generate(http, session)["token_ids"]
    assert token_ids == unbroken(http)
    history = [*TURN["token_ids"], *token_ids]
    found, metadata = captures(http, session, tmp_path)
    assert metadata["dropped"] == "0"
    assert sorted(metadata)[0] == f"00000.{armed['id']}.layer0"
    for layer in (0, 2):
        entries = [entry for entry in found if entry[0]["layer"] == layer]
        assert [place["breakpoint"] for place, _ in entries] == [armed["id"]] * len(entries)
        positions = [position for place, _ in entries for position in place["positions"]]
        assert positions == list(range(len(history) - 1))  # the last token has not been computed
        assert [token for place, _ in entries for token in place["token_ids"]] == history[:-1]
        for place, tensor in entries:
            assert tensor.shape == (len(place["positions"]), HIDDEN)
            assert np.isfinite(tensor).all()


def test_only_positions_that_are_asked_for_are_recorded(http: httpx.Client, session: str, tmp_path: Path) -> None:
    assert captures(http, session, tmp_path) == ([], {"dropped": "0"})
    arm(http, session, action="capture", when={"every": 3})
    generate(http, session)
    found, _ = captures(http, session, tmp_path)
    assert [place["positions"] for place, _ in found] == [[0, 3], [6]]
    assert http.delete(f"{session}/captures").status_code == 204
    assert captures(http, session, tmp_path) == ([], {"dropped": "0"})
    assert http.get(f"{session}/breakpoints").json()["data"]


def test_a_capture_is_what_a_pause_shows(http: httpx.Client, session: str, tmp_path: Path) -> None:
    arm(http, session, action="capture", once=True)
    pause(http, session, layer=1)
    ((place, tensor),), _ = captures(http, session, tmp_path)
    assert place["positions"] == [0, 1, 2, 3]
    assert np.array_equal(tensor, read(http, session))
