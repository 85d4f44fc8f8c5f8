import os
from pathlib import Path

import pytest

from app.model_store.resolve import resolve
from app.text.tokenizer import Tokens, load_tokens


@pytest.fixture(scope="module")
def smollm_folder() -> Path:
    model = resolve("smollm2-135m-instruct", cache_dir=Path(os.environ.get("DJINN_CACHE_DIR", "~/.cache/djinn")))
    assert model.folder is not None
    return model.folder


@pytest.fixture(scope="module")
def smollm(smollm_folder: Path) -> Tokens:
    return load_tokens(resolve(str(smollm_folder), cache_dir=smollm_folder))
