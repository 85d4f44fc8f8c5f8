"""A server on whose device a part of the weights has room: what clients and operators see of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import main
from tests.errors import assert_error
from tests.openai.reference import Reference, save_tiny_model
from tests.serving import serve

PROMPT = list(range(40, 70))
SHARE = 600_000
"""Bytes of the tiny model's 850 thousand."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return Reference(folder)


@contextmanager
def streaming(reference: Reference, cache: Path, **changed: Any) -> Iterator[httpx.Client]:
    settings = {"model": str(reference.folder), "weights_device": SHARE, "cache_dir": cache, **changed}
    with serve(**settings) as url, httpx.Client(base_url=url, timeout=30) as http:
        yield http


def start(http: httpx.Client) -> httpx.Response:
    session = http.post("/v1/sessions").json()["id"]
    body = {"token_ids": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": False}
    return http.post(f"/v1/sessions/{session}/generate", json=body)


def the_file(cache: Path) -> Path:
    [path] = (cache / "weights").glob("*.safetensors")
    return path


def test_tokens_are_right_and_the_map_says_what_the_device_has(reference: Reference, tmp_path: Path) -> None:
    with streaming(reference, tmp_path) as http:
        before = http.get("/v1/memory").json()["text"]
        assert start(http).json()["token_ids"] == reference.greedy(PROMPT, 8)
        after = http.get("/v1/memory").json()["text"]
        metrics = http.get("/metrics").text
    stored = sum(weight.nbytes for weight in reference.model.parameters())
    assert after["kept_bytes"] + after["ring_bytes"] <= SHARE < after["total_bytes"] <= stored
    assert after["streamed_bytes"] - before["streamed_bytes"] >= 7 * (after["total_bytes"] - SHARE)
    [streamed] = re.findall(r"^djinn_text_streamed_bytes_total (\S+)$", metrics, re.MULTILINE)
    assert float(streamed) >= after["streamed_bytes"]


def test_a_file_that_goes_away_or_is_replaced_is_not_missed(reference: Reference, tmp_path: Path) -> None:
    with streaming(reference, tmp_path) as http:
        path = the_file(tmp_path)
        other = path.with_name("other")
        other.write_bytes(bytes(path.stat().st_size))
        other.rename(path)
        assert start(http).json()["token_ids"] == reference.greedy(PROMPT, 8)
        path.unlink()
        assert start(http).json()["token_ids"] == reference.greedy(PROMPT, 8)


def test_weights_that_cannot_be_read_fail_the_turn_with_the_reason(reference: Reference, tmp_path: Path) -> None:
    with streaming(reference, tmp_path) as http:
        path = the_file(tmp_path)
        content = path.read_bytes()
        os.truncate(path, 8192)
        for _ in range(3):
            assert "the file ends" in assert_error(start(http), 500, "weights_lost")
        assert http.get("/health").status_code == 200
        assert http.get("/v1/memory").json()["data"]["device"]["owned_bytes"] == 0
        path.write_bytes(content)
        assert start(http).json()["token_ids"] == reference.greedy(PROMPT, 8)


def flags_of(reference: Reference, cache: Path) -> list[str]:
    """A server of the reference's model on a port that is free."""
    places = ["--model", str(reference.folder), "--cache-dir", str(cache), "--state-dir", "none"]
    return [*places, "--kv-device", "4MiB", "--port", "0"]


@pytest.mark.usefixtures("engine_in_a_thread")
def test_a_file_that_is_damaged_keeps_the_server_from_starting(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with streaming(reference, tmp_path):
        path = the_file(tmp_path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert main(["serve", *flags_of(reference, tmp_path), "--weights-device", str(SHARE)]) == 2
    said = capsys.readouterr().err
    assert path.name in said
    assert "bundle" in said


@pytest.mark.usefixtures("engine_in_a_thread")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--weights-device", "100000"], "--weights-device is 100000 bytes"),
        (["--weights-device", str(SHARE), "--cuda-graphs"], "--cuda-graphs: the device is cpu"),
        (["--weights-device", "much"], "--weights-device"),
        (["--weights-device", str(SHARE), "--chunk-size", "4KiB"], "--chunk-size"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    assert main(["serve", *flags_of(reference, tmp_path), *flags]) == 2
    assert says in capsys.readouterr().err
