"""Files of models: GGUF as it is converted, and what is read without Transformers, or refused where it is damaged.
A model by its name: a shape, a folder, a file, or what the hub has; and the tokenizer of random models.
"""

import json
import os
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from app.domain.errors import UnknownModel
from app.model_store.commands import export_model
from app.model_store.gguf import cached_gguf, convert_gguf
from app.model_store.install import BrokenModel, ModelStoreError
from app.model_store.resolve import resolve
from app.model_store.saved import SAVED, ModelTokenizer, read_config, read_tokenizer
from app.model_store.shapes import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, MIN_VOCAB_SIZE, SHAPE_NAMES
from app.model_store.tensors import GgufIndex, stored_shapes, weight_files
from app.settings import Settings
from tests.hugging_face import byte_tokenizer, shape_config
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
    (folder / "checkpoint").unlink()
    (folder / "checkpoint").symlink_to(tmp_path)  # as another version of Djinn had left it
    assert weight_files(export_model(str(tiny.gguf), tmp_path) / "checkpoint") == [tiny.gguf]


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


def test_shapes_in_shards(tiny: TinyModel, tmp_path: Path) -> None:
    deepcopy(tiny.model).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    files = list(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert len(files) > 1
    found = stored_shapes(tmp_path)
    assert found == {name: tuple(each.shape) for name, each in tensors.items()}
    save_file({"layers.0.wq": torch.zeros(64, 64)}, tmp_path / "consolidated.safetensors")  # Djinn does not read it
    assert stored_shapes(tmp_path).keys() == found.keys()


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
        stored_shapes(tmp_path)


def test_shapes_in_a_gguf_file(tiny: TinyModel, tmp_path: Path) -> None:
    folder = cached_gguf(tiny.gguf, tmp_path)
    index = GgufIndex.read(folder)
    assert stored_shapes(folder) == {name: index.values(name).shape for name in index.tensors}


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b'\x0a\0\0\0\0\0\0\0{"a": 1}  '])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BrokenModel, match=r"cannot read .*model\.safetensors"):
        stored_shapes(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *({"nbytes": -1}, {"nbytes": 1 << 60}, {"nbytes": 40}, {"offset": "0"}, {"offset": -8}, {"offset": 1 << 40}),
        *({"kind": "X"}, {"kind": "Q8_0"}, {"unheard": 1}, {"shape": []}, {"shape": [3, True]}, {"heads": 3}),
    ],
)
def test_an_index_that_fits_no_file_is_refused(tiny: TinyModel, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = cached_gguf(tiny.gguf, tmp_path)
    index = json.loads((folder / "gguf.json").read_text())
    matrix = next(name for name, tensor in index["tensors"].items() if len(tensor["shape"]) == 2)
    index["tensors"][matrix] |= change
    (folder / "gguf.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModel, match=r"cannot read .*gguf\.json"):
        stored_shapes(folder)


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


RESOLVE = """
import sys
from pathlib import Path
from app.domain.errors import DjinnError
from app.model_store.resolve import resolve

for name in sys.argv[2:]:
    try:
        model = resolve(name, cache_dir=Path(sys.argv[1]))
        print(model.name, model.folder)
    except DjinnError as error:
        print(type(error).__name__, error.message)
"""


@pytest.fixture(scope="module")
def saved(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "my-model"
    folder.mkdir()
    tiny.model.save_pretrained(folder)
    return folder


def test_a_name_is_a_random_shape_a_folder_or_a_file(saved: Path, tiny: TinyModel, tmp_path: Path) -> None:
    model = resolve("random:tiny-llama", cache_dir=tmp_path, seed=7)
    assert (model.name, model.folder, model.seed) == ("tiny-llama", None, 7)
    assert model.config.num_hidden_layers == 4
    model = resolve(str(saved), cache_dir=tmp_path)
    assert (model.name, model.folder, model.config.model_type) == ("my-model", saved, "llama")
    model = resolve(str(tiny.gguf), cache_dir=tmp_path)
    assert model.name == "tiny"
    assert model.folder is not None
    assert weight_files(model.folder) == [tiny.gguf]


@pytest.mark.parametrize("spec", ["smollm", "no/such/folder", "", "random:huge"])
def test_wrong_name_lists_the_right_ones(spec: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="tiny-llama") as caught:
        resolve(spec, cache_dir=tmp_path)
    assert caught.value.param == "model"
    with pytest.raises(UnknownModel, match=r"the Hugging Face hub has no model org/a\.\.b"):
        resolve("org/a..b", cache_dir=tmp_path)


@pytest.mark.parametrize("config", ["not json", json.dumps({"model_type": "no-such-model"})])
def test_a_folder_without_weights_or_with_a_broken_config(config: str, tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"no \.safetensors"):
        resolve(str(tmp_path), cache_dir=tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BrokenModel, match=r"config\.json"):
        resolve(str(tmp_path), cache_dir=tmp_path)


@pytest.mark.long
def test_a_hub_id_comes_from_the_hub_cache_without_network(saved: Path, tmp_path: Path) -> None:
    """In a fresh process: the hub client reads at import that it may not use the network."""
    revision = "0" * 40
    repo = tmp_path / "hub" / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / revision).symlink_to(saved, target_is_directory=True)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", RESOLVE, str(tmp_path), "org/model", "org/other"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    here, absent = done.stdout.splitlines()
    assert here == f"model {repo / 'snapshots' / revision}"
    assert absent.startswith("ModelStoreError org/other is not in the local cache")


@pytest.mark.parametrize(
    ("shape", "published_parameters"),
    [
        *(("gpt2", 124_439_808), ("llama-2-7b", 6_738_415_616), ("llama-2-13b", 13_015_864_320)),
        *(("mistral-7b", 7_248_023_552), ("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496)),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_shape_has_the_published_number_of_parameters(shape: str, published_parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape))
    assert sum(parameter.numel() for parameter in model.parameters()) == published_parameters


SPECIAL_TEXTS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
TOKENIZER = byte_tokenizer(512)


@given(st.text().filter(lambda text: not any(special in text for special in SPECIAL_TEXTS)))
def test_tokens_are_the_bytes_of_the_text(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert token_ids == list(text.encode())
    assert TOKENIZER.decode(token_ids) == text


def test_every_id_of_the_model_has_a_text_and_no_other() -> None:
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer(260)
    assert len(tokenizer) == 260
    assert all(tokenizer.decode([token_id]) for token_id in range(260))
    assert min(shape_config(shape).vocab_size for shape in SHAPE_NAMES) >= MIN_VOCAB_SIZE
    token_ids = tokenizer.encode("".join(SPECIAL_TEXTS), add_special_tokens=False)
    assert token_ids == [BOS_ID, EOS_ID, IM_START_ID, IM_END_ID]
    assert tokenizer.encode("a") == [BOS_ID, ord("a")]
