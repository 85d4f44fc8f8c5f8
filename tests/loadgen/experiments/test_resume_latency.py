"""`loadgen resume-latency`: three ways back to where a session stood, by hand and on a real server."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from client import MemoryMap
from loadgen.cli import main
from loadgen.errors import LoadgenError
from loadgen.experiments.resume_latency.away import passer_lengths
from loadgen.experiments.resume_latency.findings import Findings, Sample, ServerSplit, Way
from loadgen.experiments.resume_latency.plan import (
    DEPTHS,
    Cell,
    choose_layers,
    depth_of,
    order_of_ways,
)
from loadgen.experiments.resume_latency.report import ResumeReport
from loadgen.experiments.resume_latency.summary import summarize
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.loadgen.recording import memory
from tests.openai.reference import save_tiny_model
from tests.serving import serve

LAYERS = 4


def sample(
    way: Way, layer: int, standing_s: float, token_s: float | None, *, repeat: int = 0, length: int = 64, token: int = 7
) -> Sample:
    """One way back. Djinn's have a split of the server."""
    split = ServerSplit(1e-5, standing_s / 2, 1e-4) if way is Way.DJINN else None
    return Sample(way, length, layer, repeat, standing_s, token_s, None if token_s is None else token, 1024, split)


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(40, (0, 9, 19, 29, 39)), (30, (0, 7, 14, 22, 29)), (4, (0, 1, 2, 3)), (1, (0,))],
)
def test_at_least_so_many_percent_of_the_layers_have_run(num_layers: int, layers: tuple[int, ...]) -> None:
    found = choose_layers(num_layers, DEPTHS)
    assert found == layers
    assert all(any(depth_of(layer, num_layers) >= depth for layer in found) for depth in DEPTHS)


def test_every_way_is_first_second_and_last_as_often_as_the_others() -> None:
    orders = [order_of_ways(tuple(Way), repeat, cell) for repeat in range(3) for cell in range(5)]
    for place in range(len(Way)):
        assert set(Counter(order[place] for order in orders).values()) == {5}
    assert all(set(order) == set(Way) for order in orders)


def test_ratios_are_taken_within_a_repeat() -> None:
    """Both are twice as slow in the second repeat: the ratio is the same, and has no spread."""
    findings = Findings(
        samples=[
            sample(way, 0, repeats * seconds, None, repeat=repeats)
            for repeats in (1, 2)
            for way, seconds in ((Way.RECOMPUTE, 0.6), (Way.DJINN, 0.3), (Way.OFFLOAD, 0.1))
        ]
    )
    recompute, offload = summarize(findings, [Cell(64, 0)], LAYERS).comparisons
    for found, way, ratio in ((recompute, Way.RECOMPUTE, 2.0), (offload, Way.OFFLOAD, 3.0)):
        assert (found.way, found.ratio.count) == (way, 2)
        assert (found.ratio.low, found.ratio.median, found.ratio.high) == pytest.approx((ratio, ratio, ratio))


def server(device_tokens: int, host_tokens: int, policy: str = "signal") -> MemoryMap:
    """A server's map, with blocks of 16 tokens that take 16 bytes."""
    raw: dict[str, Any] = memory().model_dump(by_alias=True)
    data = raw["data"]
    data["block_bytes"] = data["block_tokens"] = 16
    data["device"]["total_bytes"], data["host"]["total_bytes"] = device_tokens, host_tokens
    return MemoryMap.model_validate({**raw, "policy": policy})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (server(1024, 4096, "lru"), "start it with --kv-policy signal"),
        (server(512, 4096), "start it with --kv-device 1x768"),
        (server(1 << 20, 1 << 22), "start it with --kv-device 1x768"),
        (server(1024, 1024), "start it with --kv-host 2x1024"),
    ],
)
def test_a_server_that_cannot_be_measured_is_told_how_it_could_be(found: MemoryMap, message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        passer_lengths(found, "a", longest=512, max_model_len=2048)


LENGTHS, REPEATS = (40, 150), 2
DEVICE_TOKENS = 256
STEP_TOKENS = 96
"""Less than the longer length: the server computes it in two parts."""


def resume(output: Path, *arguments: str) -> int:
    lengths = ",".join(map(str, LENGTHS))
    chosen = ["--lengths", lengths, "--repeats", str(REPEATS), "--seed", "3", "--output", str(output)]
    return main(["resume-latency", *chosen, *arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """A server whose device holds little more than the longest session."""
    with serve(model=str(model), kv_device=f"1x{DEVICE_TOKENS}", max_step_tokens=STEP_TOKENS, max_running=8) as url:
        yield url


@pytest.fixture(scope="module")
def measured(url: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run. So small a model is computed about as soon as it is fetched: the exit code can be either."""
    folder = tmp_path_factory.mktemp("results")
    resume(folder, "--target", f"djinn={url}", "--model", str(model))
    return folder


@pytest.mark.long
def test_every_way_back_to_every_place_is_timed_and_leads_to_transformers_tokens(measured: Path, url: str) -> None:
    raw_result(measured, ResumeReport, "Hand-written offload: what is timed", "(96 of 150 tokens)")
    (target,) = result(measured, ResumeReport).targets
    assert target.findings.failures == []
    assert (target.num_layers, target.layers) == (LAYERS, (0, 1, 2, 3))
    taken = [(s.way, s.length, s.layer, s.repeat) for s in target.findings.samples]
    assert sorted(taken) == sorted(product(Way, LENGTHS, range(LAYERS), range(REPEATS)))
    for sample in target.findings.samples:
        assert sample.token_s is not None
        assert 0 < sample.standing_s < 30
        assert sample.token_id is not None
        if sample.way is Way.DJINN:  # had the device had the KV still, nothing would have been copied
            assert sample.split is not None
            assert sample.split.copy_s > 0
            assert 0 < (sample.split.checkpoint_s or 0) < sample.standing_s
    assert [(each.length, each.layer) for each in target.summary.agreements] == [(40, 0), (150, 1)]
    assert all(each.djinn == each.transformers for each in target.summary.agreements)
    assert target.findings.passes == {40: 0, 150: STEP_TOKENS}, "parts before the last one are whole"
    assert sessions_on(url) == []


def test_without_its_script_the_other_ways_are_measured(
    url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script finds a Transformers that cannot be imported."""
    (tmp_path / "broken/torch").mkdir(parents=True)
    (tmp_path / "broken/torch/__init__.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{os.environ.get('PYTHONPATH', '')}")
    few = ["--lengths", "40", "--repeats", "1", "--depths", "100"]
    assert resume(tmp_path / "out", "--target", f"djinn={url}", "--model", str(model), *few) == 1
    (target,) = result(tmp_path / "out", ResumeReport).targets
    assert [sample.way for sample in target.findings.samples] == [Way.RECOMPUTE, Way.DJINN]
    assert {failure.kind for failure in target.findings.failures} == {"OffloadFailed"}
    assert "this torch is broken" in target.findings.failures[0].message
