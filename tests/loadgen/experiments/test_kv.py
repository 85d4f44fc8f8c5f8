"""`loadgen kv`: what a session's KV is made of, codecs and links, and the experiment on a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

import client
from loadgen.cli import main
from loadgen.experiments.kv.report import KVReport
from tests.loadgen.experiments.conftest import raw_result, sessions_on
from tests.serving import serve

TOKENS, REPEATS, DECODED = 64, 2, 8
LOAD = f"--tokens {TOKENS} --repeats {REPEATS} --decoded {DECODED} --seed 3 --link wire=0.001 --link bus=100".split()


def kv(output: Path, *arguments: str) -> int:
    return main(["kv", *LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a disk: an imported session brings its KV."""
    with serve(state_dir=tmp_path_factory.mktemp("state"), kv_disk=16 << 20) as url:
        yield url


@pytest.fixture(scope="module")
def target(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The second of two runs, which finds what the first has left on the server."""
    kv(tmp_path_factory.mktemp("first"), "--target", f"djinn={url}")
    folder = tmp_path_factory.mktemp("results")
    assert kv(folder, "--target", f"djinn={url}") == 0
    headings = ("What KV is made of", "How a session grows", "How long a session takes to move", "What fp8 loses")
    (found,) = raw_result(folder, KVReport, *headings)["targets"]
    assert isinstance(found, dict)
    assert found["findings"]["failures"] == []
    assert sessions_on(url) == []
    return found


def test_structure_is_that_of_an_exported_session(target: dict[str, Any], url: str, tmp_path: Path) -> None:
    """Held against a session exported here, and read by the safetensors library."""
    with client.Djinn(url) as djinn, djinn.sessions.create() as session:
        session.generate(token_ids=list(range(5, 5 + TOKENS)), max_tokens=1)
        session.export_to(tmp_path / "session")
        memory, (model,) = djinn.memory(), djinn.models()
    array = load((tmp_path / "session").read_bytes())["kv"]
    structure = target["findings"]["structure"]
    assert (structure["model"], structure["max_model_len"]) == (model.id, model.max_model_len)
    assert tuple(structure["file_shape"]) == array.shape
    assert (structure["layers"], 2, structure["kv_heads"], 16, structure["head_dim"]) == array.shape[1:]
    assert structure["block_bytes"] == memory.data.block_bytes == array[0].nbytes
    assert structure["device_bytes"] == memory.data.device.total_bytes
    assert target["growth"][0] == {
        "tokens": 128,
        "bytes": 8 * array[0].nbytes,
        "on_device": memory.data.device.total_bytes // (8 * array[0].nbytes),
        "on_host": memory.data.host.total_bytes // (8 * array[0].nbytes),
    }


def test_sessions_were_copied_each_way_over_loopback_and_through_every_codec(target: dict[str, Any]) -> None:
    findings = target["findings"]
    size = TOKENS // 16 * findings["structure"]["block_bytes"]
    copies = [(copy["direction"], copy["bytes"]) for copy in findings["copies"]]
    assert copies == [("out", size)] * REPEATS + [("in", size), ("from_disk", size)] * REPEATS
    assert all(copy["seconds"] > 0 for copy in findings["copies"])
    measured = [link["name"] for link in target["links"] if link["measured"]]
    assert measured == ["device to host", "host to device", "disk to host", "TCP loopback"]
    assert findings["loopback"]["bytes"] == findings["structure"]["file_bytes"]
    codecs = [found["codec"] for found in findings["compressions"]]
    assert codecs == ["zlib -1", "zlib -6", "zstd -3", "lz4", "fp8 e4m3"]
    assert {found["raw_bytes"] for found in findings["compressions"]} == {size}
    assert findings["compressions"][-1]["packed_bytes"] * 4 == size
    assert len(target["payoffs"]) == len(target["links"]) * len(codecs)


def test_rounded_kv_is_asked_for_an_answer(target: dict[str, Any]) -> None:
    error, answers = target["findings"]["fp8_error"], target["findings"]["fp8_answers"]
    for half in (error["keys"], error["values"]):
        assert len(half["layers"]) == target["findings"]["structure"]["layers"]
        assert 0 < half["relative"] < 2**-4  # three bits of mantissa: half of the last is at most a sixteenth
    assert len(answers["exact"]) == len(answers["rounded"]) == DECODED


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "part", "says"),
    [({}, "host to device", "no disk tier"), ({"kv_policy": "lru"}, "device to host", "its policy is lru")],
)
def test_what_a_server_cannot_do_is_said_and_the_rest_is_measured(
    settings: dict[str, Any], part: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(**settings) as url:
        assert kv(tmp_path, "--target", f"djinn={url}") == 1
    (found,) = raw_result(tmp_path, KVReport)["targets"]
    failure = found["findings"]["failures"][0]
    assert (failure["part"], says in failure["message"]) == (part, True)
    assert found["findings"]["loopback"] is not None
    assert len(found["findings"]["compressions"]) == 5
    assert "Not measured to the end" in capsys.readouterr().out
