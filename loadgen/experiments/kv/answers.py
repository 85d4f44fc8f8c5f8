"""What KV that went through fp8 does to what a session says next."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from loadgen.experiments.kv.copies import check_imported
from loadgen.experiments.kv.fp8 import from_fp8, to_fp8
from loadgen.experiments.kv.session_file import SessionFile
from loadgen.load.prompts import TokenIds
from loadgen.targets.subject import Subject, greedy


@dataclass(frozen=True, slots=True)
class Answers:
    """What the session said with its own KV, and with KV that had been rounded; greedily, both after an import."""

    exact: TokenIds
    rounded: TokenIds

    @property
    def same(self) -> int:
        """How many tokens are the same until the first that differs."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.exact, self.rounded, strict=False)))


async def ask_twice(
    subject: Subject, export: Path, file: SessionFile, tokens: int, step: Callable[[], None]
) -> Answers:
    """Import the session as it is, and again with its full blocks rounded to fp8, and let both go on.

    Raises `client.DjinnError`, and `LoadgenError` if the server keeps no KV of imported sessions.
    """
    exact = await _go_on(subject, export, tokens)
    step()
    rounded = from_fp8(to_fp8(file.full_blocks), np.dtype(file.kv.dtype))
    changed = export.with_name("rounded.safetensors")
    changed.write_bytes(file.with_blocks(rounded))
    answers = Answers(exact, await _go_on(subject, changed, tokens))
    step()
    return answers


async def _go_on(subject: Subject, file: Path, tokens: int) -> TokenIds:
    async with subject.imported(file) as session:
        check_imported(subject, session)
        return (await session.generate(**greedy((), tokens))).token_ids
