"""llama.cpp's server: what it is started with, and what is asked of its converter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.errors import LoadgenError
from loadgen.peers.base import ServerSettings
from loadgen.peers.llamacpp import SLOTS, LlamaCppPeer
from loadgen.peers.llamacpp_source import VERSION, LlamaCppSource

CONVERTER = """
import sys
open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join(sys.argv[1:4]))
"""
REFUSES = "import sys; sys.exit('Model LlamaForCausalLM is not supported')"


@pytest.fixture
def model(settings: ServerSettings) -> Path:
    folder = settings.model
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    """The GGUF file that `model` was made of."""
    file = tmp_path / "m.gguf"
    file.touch()
    (model / "checkpoint.gguf").symlink_to(file)
    return file


@pytest.fixture
def source(cache: Path) -> LlamaCppSource:
    """Unpacked, with another converter than its own."""
    source = LlamaCppSource(cache / "llamacpp" / VERSION)
    source.root.mkdir(parents=True)
    source.converter.write_text(CONVERTER)
    return source


def option(settings: ServerSettings, name: str) -> str:
    command = LlamaCppPeer().launch(settings, 8123).command
    return command[command.index(name) + 1]


@pytest.mark.usefixtures("source")
def test_the_model_is_converted_once_for_each_data_type(settings: ServerSettings, model: Path) -> None:
    first = Path(option(settings, "--model"))
    assert first.read_text() == f"{model} --outtype bf16"
    written = first.stat().st_mtime_ns
    assert Path(option(settings, "--model")) == first
    assert first.stat().st_mtime_ns == written
    single = Path(option(replace(settings, dtype="float32"), "--model"))
    assert single.read_text() == f"{model} --outtype f32"


@pytest.mark.usefixtures("source")
def test_its_best_type_is_a_quantization_of_the_same_weights(settings: ServerSettings, model: Path) -> None:
    best = Path(option(replace(settings, dtype="auto"), "--model"))
    assert best.read_text() == f"{model} --outtype q8_0"


@pytest.mark.usefixtures("source", "checkpoint")
def test_its_best_type_is_that_of_the_checkpoint_where_the_folder_was_made_of_one(
    settings: ServerSettings, model: Path
) -> None:
    assert option(replace(settings, dtype="auto"), "--model") == str(model / "checkpoint.gguf")
    assert Path(option(settings, "--model")).read_text() == f"{model} --outtype bf16"


@pytest.mark.usefixtures("source")
def test_other_weights_in_the_same_place_are_converted_again(settings: ServerSettings, model: Path) -> None:
    first = option(settings, "--model")
    os.utime(model / "model.safetensors", (1, 1))
    assert option(settings, "--model") != first


def test_a_model_that_the_converter_refuses(settings: ServerSettings, model: Path, source: LlamaCppSource) -> None:
    source.converter.write_text(REFUSES)
    with pytest.raises(LoadgenError, match=r"the conversion of .* for llama.cpp failed:\n.*LlamaForCausalLM"):
        LlamaCppPeer().launch(settings, 8123)


def test_a_folder_without_weights(settings: ServerSettings) -> None:
    with pytest.raises(LoadgenError, match="not a Transformers folder"):
        LlamaCppPeer().launch(settings, 8123)


def test_a_data_type_that_it_does_not_have(settings: ServerSettings) -> None:
    with pytest.raises(LoadgenError, match="no data type int8, only auto, float32, bfloat16, float16"):
        LlamaCppPeer().launch(replace(settings, dtype="int8"), 8123)


@pytest.mark.usefixtures("source", "model")
@pytest.mark.parametrize(
    ("dtype", "kv"), [("bfloat16", "f16"), ("float16", "f16"), ("float32", "f32"), ("auto", "f16")]
)
def test_kv_takes_as_many_bytes_as_that_of_the_others(settings: ServerSettings, dtype: str, kv: str) -> None:
    settings = replace(settings, dtype=dtype)
    assert option(settings, "--cache-type-k") == option(settings, "--cache-type-v") == kv
    assert option(settings, "--ctx-size") == "20480"


@pytest.mark.usefixtures("source", "model")
@pytest.mark.parametrize(("context", "slots"), [(1728, 11), (20480, 1), (30000, 1), (None, SLOTS)])
def test_as_many_slots_as_have_room_for_whole_conversations(
    settings: ServerSettings, context: int | None, slots: int
) -> None:
    settings = replace(settings, context_tokens=context)
    assert option(settings, "--parallel") == str(slots)
    shared = "--kv-unified" in LlamaCppPeer().launch(settings, 8123).command
    assert shared == (context is None)


def test_it_is_installed_once_its_server_is_built(source: LlamaCppSource) -> None:
    assert not LlamaCppPeer().is_installed()
    source.server.parent.mkdir(parents=True)
    source.server.touch()
    assert LlamaCppPeer().is_installed()
