"""`loadgen weights` against real servers with a tiny model: small, and whole."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.weights.findings import Way
from loadgen.experiments.weights.plan import WeightsPlan
from loadgen.experiments.weights.report import WeightsReport
from loadgen.experiments.weights.setup import Setup
from loadgen.experiments.weights.sizes import ModelBytes
from loadgen.peers.base import ServerSettings
from loadgen.results.verdicts import Outcome
from loadgen.targets import TargetSpec
from loadgen.targets.access import RunningTarget
from tests.loadgen.experiments.running import raw_result, result, sessions_on
from tests.openai.reference import save_tiny_model
from tests.serving import serve
from tests.test_settings import from_flags

BUDGET = 3 * 147_968
"""Three layers of the tiny model: two on their way, and one that stays."""
BATCHES, REPEATS = (1, 3), 2
TOKENS = 48
"""A turn of so small a model must not be over before the one beside it has begun."""
CHUNKS = (1 << 20, 2 << 20)
WAYS = {Way.STREAMED, Way.RESIDENT, Way.DOUBLE_BUFFER, Way.ACCELERATE, Way.PLAIN}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def urls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A server that streams, and one that does not."""
    with ExitStack() as stack:
        cache = tmp_path_factory.mktemp("cache")
        streamed = serve(model=str(model), max_draft_tokens=0, weights_device=BUDGET, cache_dir=cache)
        yield [stack.enter_context(each) for each in (streamed, serve(model=str(model), max_draft_tokens=0))]


@pytest.fixture
def _servers_are_up(urls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Instead of servers in processes of their own, which take long to start. No peer is installed."""
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path / "cache"))
    streamed, resident = (RunningTarget(TargetSpec(f"djinn-{number}", url)) for number, url in enumerate(urls))
    monkeypatch.setattr(Setup, "servers", lambda _self, _plan: [streamed, resident])
    monkeypatch.setattr(Setup, "chunked_servers", lambda _self, plan: [streamed] * len(plan.chunks))


def weights(model: Path, output: Path, *arguments: str) -> int:
    sizes = ["--prompt", "64", "--tokens", f"{TOKENS}", "--repeats", f"{REPEATS}", "--seed", "3"]
    return main(
        ["weights", "--model", str(model), "--budget", f"{BUDGET}", *sizes, "--output", str(output), *arguments]
    )


@pytest.mark.long
@pytest.mark.usefixtures("_servers_are_up")
def test_every_way_is_measured_with_every_batch(model: Path, urls: list[str], tmp_path: Path) -> None:
    """So small a model is computed in no time: whether a target is met is chance, and the exit code either."""
    assert weights(model, tmp_path, "--batches", "1,3", "--cold") in (0, 1)
    report = result(tmp_path, WeightsReport)
    assert report.findings.failures == []
    found = {(each.way, each.batch, each.cold, each.repeat) for each in report.findings.samples}
    warm = {(way, batch, False, repeat) for way in WAYS for batch in BATCHES for repeat in range(REPEATS)}
    cold = {(way, 1, True, repeat) for way in WAYS - {Way.RESIDENT} for repeat in range(REPEATS)}
    assert found == warm | cold
    assert len(report.findings.samples) == len(found)
    for sample in report.findings.samples:
        assert (sample.first_s is None) is (sample.way is Way.PLAIN)
        assert (sample.bytes_per_s is None) is (sample.way is Way.RESIDENT)

    streamed = report.findings.streamed_bytes[Way.STREAMED]
    assert report.model.bytes.per_pass - BUDGET < streamed < report.model.bytes.per_pass
    assert report.findings.counted_bytes == pytest.approx(streamed, rel=0.1)
    agreed = {(each.way, each.cell.batch): (each.same, each.compared) for each in report.summary.agreements}
    for way in (Way.STREAMED, Way.DOUBLE_BUFFER, Way.ACCELERATE):
        assert agreed[way, 1] == (REPEATS, REPEATS), "it says what Transformers says"
    assert report.verdicts[-1].outcome is Outcome.MET
    (path,) = tmp_path.glob("weights-*.json")
    raw_result(tmp_path, WeightsReport, "dropped from the page cache")
    with path.with_suffix(".csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(report.findings.samples)
    for url in urls:
        assert sessions_on(url) == []
    assert not list((tmp_path / "cache/peers").iterdir()), "the scratch folder is gone"


@pytest.mark.usefixtures("_servers_are_up")
def test_a_sweep_chooses_a_size(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one server here: which size is the better one is chance."""
    assert weights(model, tmp_path, "--sweep", "--chunks", "1MiB,2MiB") == 0
    report = result(tmp_path, WeightsReport)
    assert [(row.chunk_bytes, row.first_s.count) for row in report.chunks] == [(size, REPEATS) for size in CHUNKS]
    assert report.choice is not None
    assert report.choice.chunk_bytes in CHUNKS
    said = " ".join(capsys.readouterr().out.split())
    assert "the one with the earliest first token" in said
    raw_result(tmp_path, WeightsReport, "the one with the earliest first token")


def test_servers_are_started_as_djinn_can_be(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path, dtype="float32", kv_tokens=4096)
    setup, plan = Setup(settings, ModelBytes(600, 600), 100, tmp_path), WeightsPlan(prompt=2048, chunks=CHUNKS)
    servers = [*setup.servers(plan), *setup.chunked_servers(plan)]
    commands = [server.peer.launch(settings, 8123).command for server in servers]
    read = [from_flags(*command[command.index("serve") + 1 :]) for command in commands]
    assert [each.weights_device for each in read] == [100, None, 100, 100]
    assert [each.chunk_size for each in read[2:]] == list(CHUNKS)
    assert {each.max_step_tokens for each in read} == {2048}, "a prompt is computed in one pass"
    assert {each.cache_dir for each in read} == {tmp_path / "cache"}
