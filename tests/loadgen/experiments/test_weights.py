"""`loadgen weights`: ways to stream a model, the programs that Djinn is compared with, and runs on real servers."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from loadgen.cli import main
from loadgen.experiments.weights.experiment import SAMPLES
from loadgen.experiments.weights.plan import Setup, Way, WeightsPlan
from loadgen.experiments.weights.sizes import ModelBytes, read_model_bytes
from loadgen.peers.base import ServerSettings
from loadgen.rivals.double_buffer.__main__ import DoubleBuffer
from loadgen.targets import TargetSpec
from loadgen.targets.access import RunningTarget
from tests.loadgen.experiments.conftest import result, sessions_on, value
from tests.openai.reference import Reference
from tests.serving import serve
from tests.test_settings import from_flags


def test_a_pass_needs_all_but_an_embedding_that_is_only_looked_up(roomy_model: Path, tmp_path: Path) -> None:
    model = Reference(roomy_model).model
    total = sum(parameter.numel() for parameter in model.parameters())
    looked_up = model.get_input_embeddings().weight.numel()
    assert read_model_bytes(roomy_model, "bfloat16") == ModelBytes(2 * total, 2 * (total - looked_up))
    (tmp_path / "tied").mkdir()  # the embedding is the output projection too, in two files, as large models come
    save_file({"model.embed_tokens.weight": torch.zeros(8, 4)}, tmp_path / "tied/a.safetensors")
    save_file({"model.norm.weight": torch.zeros(4)}, tmp_path / "tied/b.safetensors")
    assert read_model_bytes(tmp_path / "tied", "float32") == ModelBytes(4 * 36, 4 * 36)


LAYER_BYTES = 147_968
"""Of the tiny model."""


@pytest.mark.parametrize(("layers", "message"), [(1.5, "two buffers of"), (100, "there is nothing to stream")])
def test_a_budget_that_is_of_no_use_is_refused(roomy_model: Path, tmp_path: Path, layers: float, message: str) -> None:
    asked = {"model": str(roomy_model), "dtype": "float32", "folder": str(tmp_path)}
    with pytest.raises(SystemExit, match=message):
        DoubleBuffer({**asked, "budget_bytes": int(layers * LAYER_BYTES)})


BUDGET = 3 * LAYER_BYTES
"""Two sessions that move, and one that stays."""
BATCHES, REPEATS = (1, 3), 2
DECODED = 48
"""A turn of so small a model must not be over before the one beside it has begun."""
CHUNKS = (1 << 20, 2 << 20)
WAYS = {Way.STREAMED, Way.RESIDENT, Way.DOUBLE_BUFFER, Way.ACCELERATE, Way.PLAIN}


@pytest.fixture(scope="module")
def urls(roomy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A server that streams, and one that does not."""
    plain: dict[str, Any] = {"model": str(roomy_model), "max_draft_tokens": 0}
    cache = tmp_path_factory.mktemp("cache")
    with serve(weights_device=BUDGET, cache_dir=cache, **plain) as streamed, serve(**plain) as resident:
        yield [streamed, resident]


@pytest.fixture
def _servers_are_up(urls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Instead of servers in processes of their own, which take long to start. No peer is installed."""
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path / "cache"))
    streamed, resident = (RunningTarget(TargetSpec(f"djinn-{number}", url)) for number, url in enumerate(urls))
    monkeypatch.setattr(Setup, "servers", lambda _self, _plan: [streamed, resident])
    monkeypatch.setattr(Setup, "chunked_servers", lambda _self, plan: [streamed] * len(plan.chunks))


def weights(model: Path, output: Path, *arguments: str) -> int:
    sizes = ["--prompt", "64", "--tokens", f"{DECODED}", "--repeats", f"{REPEATS}", "--seed", "3"]
    return main(
        ["weights", "--model", str(model), "--budget", f"{BUDGET}", *sizes, "--output", str(output), *arguments]
    )


@pytest.mark.long
@pytest.mark.usefixtures("_servers_are_up")
def test_every_way_is_measured_with_every_batch(roomy_model: Path, urls: list[str], tmp_path: Path) -> None:
    """So small a model is computed in no time: whether a target is met is chance, and the exit code either."""
    weights(roomy_model, tmp_path, "--batches", "1,3", "--cold")
    report = result(tmp_path, "dropped from the page cache")
    assert report.failures == ()
    samples = report.rows(SAMPLES)
    found = {(each["way"], each["batch"], each["cold"], each["repeat"]) for each in samples}
    warm = {(way.value, batch, False, repeat) for way in WAYS for batch in BATCHES for repeat in range(REPEATS)}
    cold = {(way.value, 1, True, repeat) for way in WAYS - {Way.RESIDENT} for repeat in range(REPEATS)}
    assert found == warm | cold
    assert len(samples) == len(found)
    for each in samples:
        assert (each["first_s"] is None) is (each["way"] == Way.PLAIN)
        assert (each["bytes_per_s"] is None) is (each["way"] == Way.RESIDENT)
    for way in (Way.STREAMED, Way.DOUBLE_BUFFER, Way.ACCELERATE):
        name = f"answers of {way} that are those of {Way.RESIDENT}"
        assert value(report, name, sessions="1 session") == REPEATS, "it says what Transformers says"
    (path,) = tmp_path.glob("weights-*.csv")
    with path.open() as file:
        assert len(list(csv.DictReader(file))) == len(samples)
    for url in urls:
        assert sessions_on(url) == []
    assert not list((tmp_path / "cache/peers").iterdir()), "the scratch folder is gone"


def test_servers_are_started_as_djinn_can_be(tmp_path: Path) -> None:
    settings = ServerSettings(tmp_path, dtype="float32", kv_tokens=4096)
    setup, plan = Setup(settings, ModelBytes(600, 600), 100, tmp_path), WeightsPlan(prompt=2048, chunks=CHUNKS)
    servers = [*setup.servers(plan), *setup.chunked_servers(plan)]
    commands = [server.peer.launch(settings, 8123).command for server in servers]
    read = [from_flags(*command[command.index("serve") + 1 :]) for command in commands]
    assert [each.weights_device for each in read] == [100, None, 100, 100]
    assert [each.chunk_size for each in read[2:]] == list(CHUNKS)
    assert {(each.max_step_tokens, each.cache_dir) for each in read} == {(2048, tmp_path / "cache")}
