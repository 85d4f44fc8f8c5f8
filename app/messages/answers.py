"""What a `Done` brings to whoever asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExportedKV:
    """What an export wrote: tokens of the history, and how many of them have their KV in the file."""

    tokens: int
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class ImportedKV:
    """What an import found: the history, and the `about` of the export."""

    token_ids: tuple[int, ...]
    about: str
