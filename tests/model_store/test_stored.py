"""Files of models: GGUF as it is converted, and what is read without Transformers, or refused where it is damaged."""

import json
import os
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from app.domain.errors import UnknownModel
from app.model_store.commands import export_model
from app.model_store.gguf import cached_gguf, convert_gguf
from app.model_store.install import BrokenModel, ModelStoreError
from app.model_store.saved import SAVED, ModelTokenizer, read_config, read_tokenizer
from app.model_store.tensors import GgufIndex, stored_sizes, weight_files
from app.settings import Settings
from tests.model_store.conftest import TinyModel
from tests.model_store.tiny_gguf import CHAT_TEMPLATE, rounded, tiny_model, write_gguf

TEXTS = ["the cat sat on the mat", "in 1999  and 2024", "a  1   2\n\n3", "naïve 東京 🙂", "hello<|im_end|>\n"]


@pytest.fixture(scope="module")
def converted(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(tiny.gguf, folder)
    return folder


def _assert_same_logits(folder: Path, expected: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    token_ids = torch.randint(3, 300, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids).logits, expected(token_ids).logits, rtol=0, atol=0)


def test_exported_model_has_the_logits_of_the_original_and_leads_back_to_it(tiny: TinyModel, tmp_path: Path) -> None:
    folder = export_model(str(tiny.gguf), tmp_path)
    _assert_same_logits(folder, tiny.model)
    assert (folder / "checkpoint.gguf").resolve() == tiny.gguf.resolve()
    assert weight_files(folder / "checkpoint") == [tiny.gguf]


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_quantised_weights_are_exported_without_loss(
    tiny: TinyModel, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny.model, tiny.tokenizer, kind=kind)
    _assert_same_logits(export_model(str(tmp_path / "m.gguf"), tmp_path), rounded(tiny.model, kind))


def test_a_model_whose_tensors_are_stored_transposed_is_converted(
    tiny: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("gpt2", tiny.tokenizer.get_vocab_size())
    write_gguf(tmp_path / "m.gguf", model, tiny.tokenizer)
    capfd.readouterr()  # Transformers may warn of the test's own model
    folder = cached_gguf(tmp_path / "m.gguf", tmp_path)
    assert "%|" not in capfd.readouterr().err, "no progress bar"
    _assert_same_logits(folder, model)
    assert export_model(str(tmp_path / "m.gguf"), tmp_path) == folder


def test_a_converted_folder_has_the_tokenizer_of_the_original_and_no_weights(tiny: TinyModel, converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == tiny.tokenizer.encode(text).ids
        assert tokenizer.decode(token_ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(converted).eos_token_id == 2
    assert not list(converted.glob("*.safetensors"))
    assert weight_files(converted) == [tiny.gguf], "it is read in place"


def test_file_is_converted_once_until_it_changes(tiny: TinyModel, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    shutil.copy(tiny.gguf, source)
    first = cached_gguf(source, tmp_path / "cache")
    written = (first / "config.json").stat().st_mtime_ns
    assert cached_gguf(source, tmp_path / "cache") == first
    assert (first / "config.json").stat().st_mtime_ns == written
    os.utime(source, ns=(1, 1))
    assert cached_gguf(source, tmp_path / "cache") != first


def test_a_file_that_is_not_there_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"there is no GGUF file .*gone\.gguf"):
        cached_gguf(tmp_path / "gone.gguf", tmp_path / "cache")
    source = tmp_path / "noise.gguf"
    source.write_bytes(b"noise" * 100)
    with pytest.raises(ModelStoreError, match=r"the conversion of noise\.gguf failed"):
        cached_gguf(source, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").glob("noise*"))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"without": "model.layers.1.mlp.up_proj.weight"}, r"model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"extra": "blk.0.attn_q.bias"}, r"no use for .*blk\.0\.attn_q\.bias"),
        ({"rope_scaling": "yarn"}, "rotary"),
        ({"extra": "rope_freqs.weight"}, "rotary"),
        ({"extra": "rope_factors_long.weight"}, "rotary"),
        ({"split": "klingon"}, "klingon"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(
    tiny: TinyModel, tmp_path: Path, broken: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny.model, tiny.tokenizer, **broken)
    with pytest.raises(ModelStoreError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_the_window_of_a_phi3_survives_and_heads_that_are_rotated_in_part_are_refused(
    tiny: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("phi3", tiny.model.config.vocab_size)
    for name, rotated in (("whole", 16), ("part", 8)):
        write_gguf(tmp_path / f"{name}.gguf", model, tiny.tokenizer, window=47, rotated=rotated)
    (tmp_path / "whole").mkdir()
    convert_gguf(tmp_path / "whole.gguf", tmp_path / "whole")
    assert AutoConfig.from_pretrained(tmp_path / "whole").sliding_window == 47
    with pytest.raises(ModelStoreError, match="rotated in part"):
        convert_gguf(tmp_path / "part.gguf", tmp_path)


@pytest.mark.model
def test_the_pulled_model_knows_the_capital_of_france() -> None:
    folder = export_model("smollm2-135m-instruct", Settings().cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(prompt, max_new_tokens=16, do_sample=False)
    answer = str(tokenizer.decode(output[0, prompt.shape[1] :]))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_sizes_of_shards(tiny: TinyModel, tmp_path: Path) -> None:
    deepcopy(tiny.model).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert len(files) > 1
    found = {name: (size.shape, size.elements, size.nbytes) for name, size in stored_sizes(tmp_path).items()}
    assert found == {name: (tuple(each.shape), each.numel(), each.nbytes) for name, each in tensors.items()}
    save_file({"layers.0.wq": torch.zeros(64, 64)}, tmp_path / "consolidated.safetensors")  # Djinn does not read it
    assert stored_sizes(tmp_path).keys() == found.keys()


@pytest.mark.parametrize(
    ("index", "says"),
    [
        *(
            (json.dumps({"weight_map": {"a": file}}), "no file of its folder")
            for file in ("../m", "/etc/passwd", "", 5)
        ),
        *((text, "no weight_map that can be read") for text in ("", "{}", "[" * 100_000)),
    ],
    ids=["above", "elsewhere", "no name", "number", "empty", "without", "deep"],
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, index: str, says: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BrokenModel, match=says):
        stored_sizes(tmp_path)


def test_sizes_in_a_gguf_file(tiny: TinyModel, tmp_path: Path) -> None:
    folder = cached_gguf(tiny.gguf, tmp_path)
    index = GgufIndex.read(folder)
    for name, size in stored_sizes(folder).items():
        assert (size.shape, size.nbytes) == (index.values(name).shape, index.rows(name).nbytes)


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b'\x0a\0\0\0\0\0\0\0{"a": 1}  '])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BrokenModel, match=r"cannot read .*model\.safetensors"):
        stored_sizes(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *({"nbytes": -1}, {"nbytes": 1 << 60}, {"nbytes": 40}, {"offset": "0"}, {"offset": -8}, {"offset": 1 << 40}),
        *({"kind": "X"}, {"kind": "Q8_0"}, {"unheard": 1}, {"shape": []}, {"shape": [3, True]}, {"heads": 3}),
    ],
)
def test_an_index_that_does_not_fit_its_file_is_refused(
    tiny: TinyModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = cached_gguf(tiny.gguf, tmp_path)
    index = json.loads((folder / "gguf.json").read_text())
    matrix = next(name for name, tensor in index["tensors"].items() if len(tensor["shape"]) == 2)
    index["tensors"][matrix] |= change
    (folder / "gguf.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match=r"cannot read .*gguf\.json"):
        stored_sizes(folder)


@pytest.fixture(scope="module")
def folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached_gguf(tiny.gguf, tmp_path_factory.mktemp("cache"))


def test_config_and_tokenizer_are_those_that_transformers_reads(folder: Path) -> None:
    expected = AutoConfig.from_pretrained(folder).to_dict()
    del expected["_name_or_path"]
    config = read_config(folder)
    assert config.to_dict() == json.loads(json.dumps(expected, default=str))
    assert config.get_text_config().rope_parameters == expected["rope_parameters"]
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer = ModelTokenizer.of(loaded)
    found = read_tokenizer(folder)
    assert found.backend.to_str() == tokenizer.backend.to_str()
    assert replace(found, backend=tokenizer.backend) == tokenizer


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"config": [], "tokenizer": 5}', '{"config": {}}', pytest.param("[" * 100_000, id="deep")]
)
def test_a_file_without_the_parts_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / SAVED).write_text(content)
    for read in (read_config, read_tokenizer):
        with pytest.raises(BrokenModel, match=SAVED):
            read(tmp_path)


@pytest.mark.parametrize("name", [SAVED, "tokenizer.json"])
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{")
    with pytest.raises(BrokenModel, match=name):
        read_tokenizer(tmp_path)
