from __future__ import annotations

from pathlib import Path

import pytest

from app.domain.errors import UnknownModel
from app.model_store.catalog import CATALOG
from app.model_store.commands import list_models, pull
from app.model_store.pull import pulled_folder


def test_list_says_what_is_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_models(tmp_path)
    before = capsys.readouterr().out
    pulled_folder(CATALOG["smollm2-135m-instruct"], tmp_path).mkdir(parents=True)
    list_models(tmp_path)
    after = capsys.readouterr().out
    assert "smollm2-135m-instruct" in before
    assert ("yes" in before, "yes" in after) == (False, True)


def test_pull_of_an_unknown_name_lists_the_right_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"'llama'.*smollm2-135m-instruct"):
        pull("llama", tmp_path)


def test_pull_of_what_is_here_prints_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pulled_folder(CATALOG["smollm2-135m-instruct"], tmp_path)
    folder.mkdir(parents=True)
    pull("smollm2-135m-instruct", tmp_path)
    captured = capsys.readouterr()
    assert captured.out == f"{folder}\n"
    assert "already here" in captured.err
