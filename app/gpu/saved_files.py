"""KV files that an earlier server has left: their sessions claim them when they come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.domain import SessionId
from app.gpu.kv_blocks import BlockHash
from app.gpu.placement import Placement
from app.gpu.sequence import Sequence as EngineSequence
from app.gpu.sequence import common_prefix


@dataclass(frozen=True, slots=True)
class SavedKV:
    """What a file says of itself: the tokens that it was written with, and how many of them have KV."""

    token_ids: Sequence[int]
    computed: int
    namespace: BlockHash


class SavedFiles:
    """Every file that was in the folder at the start and has no session yet."""

    def __init__(self, placement: Placement, files: Mapping[SessionId, SavedKV]) -> None:
        self._placement = placement
        self._files = dict(files)

    def claim(self, sequence: EngineSequence) -> None:
        """Give a session that has just been opened the KV in its file, as far as the two have the same tokens."""
        saved = self._files.pop(sequence.session, None)
        if saved is None:
            return
        same = common_prefix(sequence.tokens, tuple(saved.token_ids))
        if saved.namespace == sequence.namespace and same:  # what was imported stays apart from others
            self._placement.lower.adopt(sequence, min(same, saved.computed))
        else:
            self._placement.tiers.delete_file(sequence)

    def delete_rest(self) -> None:
        """No more sessions come back."""
        for session, saved in self._files.items():
            self._placement.tiers.delete_file(EngineSequence(session, saved.namespace))
        self._files.clear()
