"""A server on whose device a part of the weights has room: what clients and operators see of it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

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
def streaming(reference: Reference, cache: Path) -> Iterator[httpx.Client]:
    served = serve(model=str(reference.folder), weights_device=SHARE, cache_dir=cache)
    with served as url, httpx.Client(base_url=url, timeout=30) as http:
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
