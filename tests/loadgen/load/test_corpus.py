"""Texts come from Python's help or from a file, of which a bad line is named."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from loadgen.errors import LoadgenError
from loadgen.load.corpus import python_topics, read_texts

CONVERSATIONS = [
    {
        "id": "a",
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi\u2028there"},
        ],
    },
    {"id": "b", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bye"}]},
]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return path


def test_a_file_gives_its_first_system_text_and_all_conversations(tmp_path: Path) -> None:
    corpus = read_texts(write(tmp_path, *(json.dumps(each, ensure_ascii=False) for each in CONVERSATIONS), ""))
    assert corpus.name == "texts.jsonl"
    assert corpus.system == "Be kind."
    assert corpus.documents == ("user: Hello\n\nassistant: Hi\u2028there\n\n", "user: Bye\n\n")


def test_documents_are_read_from_any_of_them_on_for_ever(tmp_path: Path) -> None:
    corpus = read_texts(write(tmp_path, *map(json.dumps, CONVERSATIONS)))
    first, second = corpus.documents
    assert list(islice(corpus.read_from(1), 3)) == [second, first, second]


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "c"}', '{"id": "c", "messages": [{"role": "user"}]}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, json.dumps(CONVERSATIONS[0]), line)
    with pytest.raises(LoadgenError, match=r"texts\.jsonl, line 2: not a conversation: \S") as refused:
        read_texts(path)
    assert "pydantic" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"id": "c", "messages": []}', b"\xff\xfe"])
def test_a_file_without_conversations_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(LoadgenError, match=r"empty\.jsonl"):
        read_texts(path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match="cannot read"):
        read_texts(tmp_path / "none.jsonl")


def test_python_brings_enough_real_text() -> None:
    corpus = python_topics()
    assert sum(map(len, corpus.documents)) > 300_000
    assert corpus.system not in corpus.documents
    assert corpus.sha256 == python_topics().sha256
