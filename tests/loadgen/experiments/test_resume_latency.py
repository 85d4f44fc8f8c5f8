"""`loadgen resume-latency`: three ways back to where a session stood, by hand and on a real server."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from client import Djinn, MemoryMap
from client.models import DefaultSampling, Model
from loadgen.cli import main
from loadgen.errors import LoadgenError
from loadgen.experiments.resume_latency.away import passer_lengths
from loadgen.experiments.resume_latency.findings import Findings, Sample, Way
from loadgen.experiments.resume_latency.offload import OffloadFailed, Shape
from loadgen.experiments.resume_latency.plan import Cell
from loadgen.experiments.resume_latency.report import ResumeReport
from loadgen.experiments.resume_latency.summary import summarize
from tests.loadgen.experiments.conftest import raw_result, result, sessions_on
from tests.serving import serve

LAYERS = 4


def test_ratios_are_taken_within_a_repeat() -> None:
    """Both are twice as slow in the second repeat: the ratio is the same, and has no spread."""
    findings = Findings(
        samples=[
            Sample(way, 64, 0, repeats, repeats * seconds, None, None, 1024, None)
            for repeats in (1, 2)
            for way, seconds in ((Way.RECOMPUTE, 0.6), (Way.DJINN, 0.3), (Way.OFFLOAD, 0.1))
        ]
    )
    recompute, offload = summarize(findings, [Cell(64, 0)], LAYERS).comparisons
    for found, way, ratio in ((recompute, Way.RECOMPUTE, 2.0), (offload, Way.OFFLOAD, 3.0)):
        assert (found.way, found.ratio.count) == (way, 2)
        assert (found.ratio.low, found.ratio.median, found.ratio.high) == pytest.approx((ratio, ratio, ratio))


def server(url: str, device_tokens: int, host_tokens: int, policy: str = "signal") -> MemoryMap:
    """A server's map, with blocks of 16 tokens that take 16 bytes."""
    with Djinn(url) as djinn:
        memory = djinn.memory()
    tiers = {"device": device_tokens, "host": host_tokens}
    sizes = {name: getattr(memory.data, name).model_copy(update={"total_bytes": size}) for name, size in tiers.items()}
    data = memory.data.model_copy(update={"block_bytes": 16, "block_tokens": 16, **sizes})
    return memory.model_copy(update={"policy": policy, "data": data})


@pytest.mark.parametrize(
    ("device_tokens", "host_tokens", "policy", "message"),
    [
        (1024, 4096, "lru", "start it with --kv-policy signal"),
        (512, 4096, "signal", "start it with --kv-device 1x768"),
        (1 << 20, 1 << 22, "signal", "start it with --kv-device 1x768"),
        (1024, 1024, "signal", "start it with --kv-host 2x1024"),
    ],
)
def test_a_server_that_cannot_be_measured_is_told_how_it_could_be(
    url: str, device_tokens: int, host_tokens: int, policy: str, message: str
) -> None:
    with pytest.raises(LoadgenError, match=message):
        passer_lengths(server(url, device_tokens, host_tokens, policy), "a", longest=512, max_model_len=2048)


LENGTHS, REPEATS = (40, 150), 2
DEVICE_TOKENS = 256
STEP_TOKENS = 96
"""Less than the longer length: the server computes it in two parts."""


def resume(output: Path, *arguments: str) -> int:
    lengths = ",".join(map(str, LENGTHS))
    chosen = ["--lengths", lengths, "--repeats", str(REPEATS), "--seed", "3", "--output", str(output)]
    return main(["resume-latency", *chosen, *arguments])


@pytest.fixture(scope="module")
def url(roomy_model: Path) -> Iterator[str]:
    """A server whose device holds little more than the longest session."""
    steps: dict[str, Any] = {"max_step_tokens": STEP_TOKENS, "max_running": 8}
    with serve(model=str(roomy_model), kv_device=f"1x{DEVICE_TOKENS}", **steps) as url:
        yield url


@pytest.mark.long
def test_every_way_back_to_every_place_is_timed_and_leads_to_transformers_tokens(
    url: str, roomy_model: Path, tmp_path: Path
) -> None:
    """So small a model is computed about as soon as it is fetched: the exit code can be either."""
    resume(tmp_path, "--target", f"djinn={url}", "--model", str(roomy_model))
    raw_result(tmp_path, ResumeReport, "Hand-written offload: what is timed", "(96 of 150 tokens)")
    (target,) = result(tmp_path, ResumeReport).targets
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


def test_a_model_of_another_shape_than_the_servers_is_refused(url: str, roomy_model: Path, tmp_path: Path) -> None:
    sampling = DefaultSampling(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
    shape: Any = {"max_model_len": 512, "layers": 7, "hidden_size": 64, "root": "x", "parent": None}
    served = Model(id="other", chat_format="hermes", default_sampling=sampling, **shape)
    for folder, message in ((roomy_model, "not of the shape of the server's"), (tmp_path, "reading the shape of")):
        with pytest.raises(OffloadFailed, match=message):
            Shape.of(server(url, 1024, 4096), served, "float32", folder)
