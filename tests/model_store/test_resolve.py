from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.domain.errors import UnknownModel
from app.model_store.errors import BrokenModel
from app.model_store.gguf.index import weight_files
from app.model_store.resolve import resolve
from tests.model_store.conftest import TinyModel

RESOLVE = """
import sys
from pathlib import Path
from app.domain.errors import DjinnError
from app.model_store.resolve import resolve

try:
    model = resolve(sys.argv[1], cache_dir=Path(sys.argv[2]))
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


def test_random_shape(tmp_path: Path) -> None:
    model = resolve("random:tiny-llama", cache_dir=tmp_path, seed=7)
    assert (model.name, model.folder, model.seed) == ("tiny-llama", None, 7)
    assert model.config.num_hidden_layers == 4


def test_local_folder(folder: Path, tmp_path: Path) -> None:
    model = resolve(str(folder), cache_dir=tmp_path)
    assert (model.name, model.folder) == ("my-model", folder)
    assert model.config.model_type == "llama"


def test_gguf_file(tiny: TinyModel, tmp_path: Path) -> None:
    model = resolve(str(tiny.gguf), cache_dir=tmp_path)
    assert model.name == "tiny"
    assert model.folder is not None
    assert weight_files(model.folder) == [tiny.gguf]


@pytest.mark.parametrize("spec", ["smollm", "no/such/folder", "", "random:huge"])
def test_wrong_name_lists_the_right_ones(spec: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="tiny-llama") as caught:
        resolve(spec, cache_dir=tmp_path)
    assert caught.value.param == "model"


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"no \.safetensors"):
        resolve(str(tmp_path), cache_dir=tmp_path)


@pytest.mark.parametrize("config", ["not json", "{}", json.dumps({"model_type": "no-such-model"})])
def test_folder_with_a_broken_config(config: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(BrokenModel, match=r"config\.json"):
        resolve(str(tmp_path), cache_dir=tmp_path)


def _resolve_offline(spec: str, hub: Path) -> str:
    """What `resolve` says in a fresh process that may not use the network; the hub client reads this at import."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub)}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, spec, str(hub)], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_hub_id_without_network(tmp_path: Path) -> None:
    said = _resolve_offline("org/model", tmp_path)
    assert said.startswith("DownloadFailed org/model is not in the local cache")


def test_hub_id_that_cannot_exist(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"the Hugging Face hub has no model org/a\.\.b"):
        resolve("org/a..b", cache_dir=tmp_path)


def test_hub_id_from_the_hub_cache(folder: Path, tmp_path: Path) -> None:
    revision = "0" * 40
    repo = tmp_path / "hub" / "models--org--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / revision).symlink_to(folder, target_is_directory=True)
    assert _resolve_offline("org/model", tmp_path) == f"model {repo / 'snapshots' / revision}\n"
