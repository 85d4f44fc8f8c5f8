"""KV that leaves memory or comes to it: each session's own file in the disk tier, files that clients export and import,
sessions that move between servers.
"""

from typing import Any

from app.domain.values import Tier
from app.gpu.kv.cache import KVCache
from app.gpu.kv.ledger import MoveLedger
from app.gpu.state.blocks import BlockHash
from app.gpu.state.moves import Move, MoveKind
from app.gpu.state.sequence import TokenSequence


class KVFiles:
    """Orders files to be written, read and deleted."""

    def __init__(self, cache: KVCache, ledger: MoveLedger) -> None:
        self._cache = cache
        self._ledger = ledger
        self.used = 0
        """Blocks in the files of all sessions."""

    def save(self, sequence: TokenSequence) -> None:
        """Move the KV from the host to the session's file, unless the file has it already. There must be no KV of a
        half pass.
        """
        sequence.require_tier(Tier.HOST)
        sequence.incoming = None  # a restore under way no longer counts
        if sequence.disk_tokens >= sequence.computed:
            self._cache.release_copies(sequence, 0)
            return
        self._set_size(sequence, len(sequence.host_blocks))
        sequence.disk_tokens, sequence.sent = 0, False
        sequence.moving = Tier.TO_DISK
        self._cache.host.share(sequence.host_blocks)
        sequence.saving = self._ledger.order(
            sequence,
            MoveKind.TO_DISK,
            source=tuple(sequence.host_blocks),
            token_ids=tuple(sequence.tokens[: sequence.computed]),
            computed=sequence.computed,
            namespace=file_namespace(sequence, sequence.computed),
        )

    def load(self, sequence: TokenSequence) -> bool:
        """Read the KV from the session's file into the host. False, and nothing is changed, if there is no room."""
        sequence.require_tier(Tier.DISK)
        if sequence.incoming is None:
            if self._cache.host.available < sequence.disk_blocks:
                return False
            target = tuple(self._cache.host.allocate(sequence.disk_blocks))
            sequence.incoming = self._ledger.order(sequence, MoveKind.FROM_DISK, target=target)
        sequence.moving = Tier.TO_HOST
        return True

    def forget(self, sequence: TokenSequence) -> None:
        """Delete the session's file, if it has one and does not live in it."""
        if sequence.disk_blocks:
            self._set_size(sequence, 0)
            sequence.disk_tokens = 0
            sequence.saving = None
            self.delete(sequence)

    def delete(self, sequence: TokenSequence) -> None:
        """Delete the session's file, whatever is in it."""
        self._ledger.order(sequence, MoveKind.DELETE)

    def export(self, sequence: TokenSequence, path: str, about: str) -> Move:
        """Write the history, and the KV of whole passes that the host has, to the client's file `path`."""
        return self._send_out(sequence, MoveKind.EXPORT, path=path, about=about)

    def import_file(self, sequence: TokenSequence, path: str, *, max_tokens: int) -> Move:
        """Make a client's file the file of a new session, if it is valid."""
        return self._ledger.order(sequence, MoveKind.IMPORT, path=path, max_tokens=max_tokens)

    def send(self, sequence: TokenSequence, connection: int) -> Move:
        """Send the history, and the KV of whole passes that the host has, to another server."""
        return self._send_out(sequence, MoveKind.SEND, connection=connection)

    def receive(self, sequence: TokenSequence, connection: int, blocks: int) -> Move:
        """Receive the KV of a new session from another server: into `blocks` host blocks, which are available, or into
        the session's file if that is 0.
        """
        return self._ledger.order(
            sequence,
            MoveKind.RECEIVE,
            target=tuple(self._cache.host.allocate(blocks)),
            token_ids=tuple(sequence.tokens),
            namespace=file_namespace(sequence, len(sequence.tokens)),
            connection=connection,
        )

    def _send_out(self, sequence: TokenSequence, kind: MoveKind, **where: Any) -> Move:
        """Order a copy of the history, and of the KV of whole passes that the host has."""
        host = self._cache.host
        computed = min(sequence.computed, len(sequence.host_blocks) * host.block_size)
        blocks = sequence.host_blocks[: host.blocks_for(computed)]
        host.share(blocks)
        token_ids = tuple(sequence.tokens)
        return self._ledger.order(sequence, kind, source=tuple(blocks), token_ids=token_ids, computed=computed, **where)

    def adopt(self, sequence: TokenSequence, computed: int, file_blocks: int) -> None:
        """Note that the session's file holds the KV of the first `computed` tokens, and that there is no other KV."""
        self._set_size(sequence, file_blocks)
        sequence.disk_tokens = sequence.computed = computed

    def _set_size(self, sequence: TokenSequence, blocks: int) -> None:
        self.used += blocks - sequence.disk_blocks
        sequence.disk_blocks = blocks


def file_namespace(sequence: TokenSequence, computed: int) -> BlockHash:
    """Namespace of a file with the KV of the first `computed` tokens: the session's own, and its interventions."""
    return sequence.namespace + sequence.interventions.fingerprint(0, computed)
