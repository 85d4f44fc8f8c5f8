"""A model by its name: a shape, a folder, a file, or what the hub has; and the tokenizer of random models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from app.domain.errors import UnknownModel
from app.model_store.install import BrokenModel
from app.model_store.resolve import resolve
from app.model_store.shapes import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, MIN_VOCAB_SIZE, SHAPE_NAMES
from app.model_store.tensors import weight_files
from tests.hugging_face import byte_tokenizer, shape_config
from tests.model_store.conftest import TinyModel

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
def folder(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "my-model"
    folder.mkdir()
    tiny.model.save_pretrained(folder)
    return folder


def test_a_name_is_a_random_shape_a_folder_or_a_file(folder: Path, tiny: TinyModel, tmp_path: Path) -> None:
    model = resolve("random:tiny-llama", cache_dir=tmp_path, seed=7)
    assert (model.name, model.folder, model.seed) == ("tiny-llama", None, 7)
    assert model.config.num_hidden_layers == 4
    model = resolve(str(folder), cache_dir=tmp_path)
    assert (model.name, model.folder, model.config.model_type) == ("my-model", folder, "llama")
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
def test_a_hub_id_comes_from_the_hub_cache_without_network(folder: Path, tmp_path: Path) -> None:
    """In a fresh process: the hub client reads at import that it may not use the network."""
    revision = "0" * 40
    repo = tmp_path / "hub" / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / revision).symlink_to(folder, target_is_directory=True)
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
