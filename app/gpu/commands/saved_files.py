"""KV files that an earlier server has left: their sessions claim them when they come back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from app.domain.histories import common_prefix
from app.domain.values import SessionId
from app.gpu.kv.placement import Placement
from app.gpu.kv.tiers import file_namespace
from app.gpu.state.blocks import BlockHash
from app.gpu.state.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class SavedKV:
    """Header of a file: its tokens, and the number of them that have KV."""

    token_ids: Sequence[int]
    computed: int
    namespace: BlockHash


@dataclass(frozen=True, slots=True)
class FilesFound:
    """The files in the folder at the start; `refused` are damaged or of another model."""

    saved: Mapping[SessionId, SavedKV] = field(default_factory=dict)
    refused: Collection[SessionId] = ()


class SavedFiles:
    """Files that have no session yet. None is deleted before every session has been opened and could claim its own."""

    def __init__(self, placement: Placement, found: FilesFound) -> None:
        self._placement = placement
        self._files = dict(found.saved)
        self._refused = found.refused

    def claim(self, sequence: TokenSequence) -> None:
        """Give a session that has just been opened the KV in its file, up to the first token that differs."""
        saved = self._files.pop(sequence.session, None)
        if saved is None:
            return
        same = common_prefix(tuple(sequence.tokens), tuple(saved.token_ids))
        if same and saved.namespace == file_namespace(sequence, saved.computed):  # imported KV stays apart
            blocks = self._placement.tiers.cache.host.blocks_for(saved.computed)
            self._placement.adopt(sequence, min(same, saved.computed), blocks)
        else:
            self._placement.tiers.delete_file(sequence)

    def delete_rest(self) -> None:
        """Delete the files that no session has claimed, as every session has been opened."""
        for session in (*self._files, *self._refused):
            self._placement.tiers.delete_file(TokenSequence(session, b""))
        self._placement.count_disk_failures(len(self._refused))
        self._files, self._refused = {}, ()
