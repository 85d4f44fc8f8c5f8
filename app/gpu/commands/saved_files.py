"""KV files that an earlier server has left: their sessions claim them when they come back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from app.domain.histories import common_prefix
from app.domain.values import SessionId
from app.gpu.kv.blocks import BlockHash
from app.gpu.kv_tiers.files import file_namespace
from app.gpu.kv_tiers.placement import Placement
from app.gpu.state.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class SavedKV:
    """What a file says of itself: the tokens that it was written with, and how many of them have KV."""

    token_ids: Sequence[int]
    computed: int
    namespace: BlockHash


@dataclass(frozen=True, slots=True)
class FilesFound:
    """What was in the folder at the start; `refused` are files that are damaged or of another model."""

    saved: Mapping[SessionId, SavedKV] = field(default_factory=dict)
    refused: Collection[SessionId] = ()


class SavedFiles:
    """Files that have no session yet. Nothing is deleted before every session has had its chance to claim one."""

    def __init__(self, placement: Placement, found: FilesFound) -> None:
        self._placement = placement
        self._files = dict(found.saved)
        self._refused = found.refused

    def claim(self, sequence: EngineSequence) -> None:
        """Give a session that has just been opened the KV in its file, as far as the two have the same tokens."""
        saved = self._files.pop(sequence.session, None)
        if saved is None:
            return
        same = common_prefix(tuple(sequence.tokens), tuple(saved.token_ids))
        if (
            saved.namespace == file_namespace(sequence, saved.computed) and same
        ):  # what was imported stays apart from others
            blocks = self._placement.tiers.cache.host.blocks_for(saved.computed)
            self._placement.lower.adopt(sequence, min(same, saved.computed), blocks)
        else:
            self._placement.tiers.files.delete(sequence)

    def delete_rest(self) -> None:
        """No more sessions come back."""
        for session in (*self._files, *self._refused):
            self._placement.tiers.files.delete(EngineSequence(session, b""))
        self._placement.count_disk_failures(len(self._refused))
        self._files, self._refused = {}, ()
