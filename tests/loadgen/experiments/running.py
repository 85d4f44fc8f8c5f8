"""Experiments run from their command line, and the files that they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import jsonschema

import client
from loadgen.results.files import Result, read_result
from loadgen.results.schema import json_schema

R = TypeVar("R", bound=Result)


def result(folder: Path, kind: type[R]) -> R:
    """The only one in `folder`."""
    (path,) = folder.glob("*-*.json")
    return read_result(path, kind)


def raw_result(folder: Path, kind: type[Result], *words: str) -> dict[str, Any]:
    """The same as it is written, which is what its schema says. Its page has these words, and its figures are pictures
    too.
    """
    (path,) = folder.glob("*-*.json")
    written: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(written, json_schema(kind))
    read_result(path, kind)
    page = path.with_suffix(".html").read_text()
    assert [word for word in words if word not in page] == []
    assert page.count("<svg") == len(list(folder.glob("*.png"))) > 0
    return written


def sessions_on(url: str) -> list[client.Session]:
    """Those that a server has."""
    with client.Djinn(url, timeout=30) as djinn:
        return list(djinn.sessions.list())
