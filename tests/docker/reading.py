"""What the files under docker/ say, and the folder that they are in."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from app.flags import OneLineParser, add_flags, settings_of
from app.settings import Settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
INSTRUCTION = re.compile(r"^([A-Z]+) ((?:.*\\\n)*.*)$", re.MULTILINE)


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DOCKER / name).read_text()))


def instructions(word: str) -> list[str]:
    """What follows this word in the Dockerfile, joined to one line each."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    found = INSTRUCTION.findall(text)
    return [re.sub(r"\s*\\\n\s*", " ", rest) for each, rest in found if each == word]


def image_environment() -> dict[str, str]:
    """The variables that the Dockerfile sets in its last stage."""
    return dict(each.split("=", 1) for each in instructions("ENV")[-1].split())


def served(arguments: list[str]) -> Settings:
    """The settings that `djinn` gets with these arguments. Ends with status 2 for a flag that there is not."""
    assert arguments[0] == "serve"
    parser = OneLineParser()
    add_flags(parser)
    return settings_of(parser.parse_args(arguments[1:]))


def pinned(name: str) -> dict[str, str]:
    found = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {package.lower().replace("_", "-"): version for package, version in found}


def dashboard() -> Any:
    return json.loads((DOCKER / "grafana/djinn.json").read_text())
