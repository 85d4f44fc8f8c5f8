"""A notebook as a page of the site: its text, its code, and what that printed and drew in the last run."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

PICTURES = {"image/png": ".png", "image/svg+xml": ".svg"}
"""Kinds of pictures, and the suffixes of their files."""
WORDS = "text/plain"


def notebook_page(source: str, content: bytes) -> tuple[str, dict[str, bytes]]:
    """The page of the notebook `source`, and its pictures by their paths: beside it, numbered.

    Raises `ValueError` for an output that is neither text nor a picture.
    """
    path = PurePosixPath(source)
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    heading = path.stem
    for cell in json.loads(content)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            heading = (re.findall(r"^#+ (.+)$", text, re.MULTILINE) or [heading])[-1]
            continue
        parts.append(_fenced("python", text))
        for kind, value in _outputs(cell):
            if kind in PICTURES:
                picture = path.with_name(f"{path.stem}-{len(pictures) + 1}{PICTURES[kind]}")
                pictures[str(picture)] = value.encode() if kind == "image/svg+xml" else base64.b64decode(value)
                parts.append(f"![{heading}]({picture.name})")
            else:
                parts.append(_fenced("text", value))
    return "\n\n".join(parts) + "\n", pictures


def _outputs(cell: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and value of each output of a code cell; a picture comes without the words for it."""
    for output in cell["outputs"]:
        data = output.get("data", {WORDS: output["text"]} if output.get("name") == "stdout" else {})
        kind = next((kind for kind in (*PICTURES, WORDS) if kind in data), None)
        if kind is None:
            raise ValueError(f"cell {cell['id']} has an output that is neither text nor a picture")
        yield kind, "".join(data[kind])


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
