"""The files of a run: JSON with all that was measured and what is needed to repeat it, Markdown with the tables."""

import datetime
import re
from pathlib import Path
from typing import Any

import orjson

from loadgen.processes.launch import ROOT

RESULTS = ROOT / "benchmarks" / "results"
_INDENT = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


def utc_now() -> str:
    """Such as `2026-01-31T09:30:00Z`."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def file_stem(cpu: str, cores: int, date: str) -> str:
    """Such as `amd-epyc-2-cores-2026-01-31T093000Z`."""
    slug = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((?:r|tm)\)", "", cpu.lower())).strip("-")
    digits = date.replace(":", "")
    return f"{slug}-{cores}-cores-{digits}"


def write_results(folder: Path, stem: str, run: Any, markdown: str) -> Path:
    """Writes `STEM.json` from the dataclass `run`, and `STEM.md`; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_bytes(orjson.dumps(run, option=_INDENT))
    path = folder / f"{stem}.md"
    path.write_text(markdown)
    return path
