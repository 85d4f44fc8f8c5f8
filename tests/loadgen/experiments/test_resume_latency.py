"""`loadgen resume-latency`: three ways back to where a session stood, by hand and on a real server."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from client import Djinn, MemoryMap
from loadgen.cli import main
from loadgen.errors import LoadgenError
from loadgen.experiments.resume_latency.away import passer_lengths
from loadgen.experiments.resume_latency.experiment import SAMPLES
from loadgen.experiments.resume_latency.plan import Way
from tests.loadgen.experiments.conftest import result, sessions_on, value
from tests.serving import serve

LAYERS = 4
AWAY = "samples of Djinn whose KV had left the device, and of which nothing was recomputed"


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
    found = result(tmp_path, "Hand-written offload")
    assert found.failures == ()
    samples = found.rows(SAMPLES)
    taken = sorted((s["way"], s["length"], s["layer"], s["repeat"]) for s in samples)
    assert taken == sorted(product(map(str, Way), LENGTHS, range(LAYERS), range(REPEATS)))
    for sample in samples:
        assert 0 < sample["standing_s"] < 30
        assert sample["token_s"] is not None
    assert value(found, "next tokens that are those of Transformers") == 2
    assert value(found, AWAY) == 2 * LAYERS * REPEATS
    assert sessions_on(url) == []
