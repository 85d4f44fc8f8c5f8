"""Exporting sessions to files and importing them."""

from app.domain.errors import BadExport, DiskShort, DjinnError, EngineError
from app.domain.values import SessionId, Tier
from app.gpu.commands.sessions import namespace_hash
from app.gpu.kv.moves import Move, Moved, MoveKind
from app.gpu.kv_tiers.placement import Placement
from app.gpu.state.sequence import TokenSequence
from app.messages import Done, Event, Export, ExportedKV, Failed, Import, ImportedKV


class SessionFiles:
    """Exports and imports under way. An export first brings the KV to the host, if there is room for it."""

    def __init__(self, placement: Placement, max_model_len: int) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._max_model_len = max_model_len
        self._waiting: dict[SessionId, list[tuple[Export, TokenSequence]]] = {}
        self._writing: dict[int, Export] = {}
        self._reading: dict[int, tuple[Import, TokenSequence]] = {}

    def export(self, sequence: TokenSequence, command: Export) -> list[Event]:
        """Begin to write the session's file; `finish` answers."""
        self._waiting.setdefault(command.session, []).append((command, sequence))
        self.continue_exports(command.session)
        return []

    def import_(self, command: Import) -> list[Event]:
        """Begin to check a client's file; `finish` answers."""
        sequence = TokenSequence(command.session, namespace_hash(command.namespace), tenant=command.tenant)
        move = self._tiers.files.import_file(sequence, command.path, max_tokens=self._max_model_len)
        self._reading[move.number] = command, sequence
        return []

    def continue_exports(self, session: SessionId) -> None:
        """Write the exports of a session if its KV has come to the host, or will not come."""
        for command, sequence in self._waiting.pop(session, []):
            if self._bring_to_host(sequence):
                move = self._tiers.files.export(sequence, command.path, command.about)
                self._writing[move.number] = command
            else:
                self._waiting.setdefault(session, []).append((command, sequence))

    def finish(self, move: Move, report: Moved) -> tuple[list[Event], TokenSequence | None]:
        """Answer the command whose move has ended; a valid import also returns its sequence."""
        if move.kind is MoveKind.EXPORT:
            command = self._writing.pop(move.number)
            if report.error is not None:
                return [Failed(command.ticket, _failure(report))], None
            return [Done(command.ticket, ExportedKV(len(move.token_ids), move.computed))], None
        asked, sequence = self._reading.pop(move.number)
        if report.error is not None:
            return [Failed(asked.ticket, BadExport(f"the import failed: {report.error}"))], None
        sequence.tokens = list(report.token_ids)
        sequence.assume_computed()
        sequence.sent = True
        blocks = self._tiers.cache.host.blocks_for(report.computed)
        self._placement.lower.adopt(sequence, report.computed, blocks)
        found = ImportedKV(report.token_ids, report.about_at, report.about_bytes)
        return [Done(asked.ticket, found)], sequence

    def _bring_to_host(self, sequence: TokenSequence) -> bool:
        """Whether the host has as much of the session's KV as it can get; if not, copies are on their way."""
        if sequence.busy:
            return True
        if sequence.tier is Tier.DISK:
            return not self._tiers.files.load(sequence)
        if sequence.tier is Tier.DEVICE and len(sequence.host_blocks) < len(sequence.blocks):
            end = self._tiers.cache.pool.blocks_for(sequence.computed)
            copying = self._tiers.copy_out(sequence, end) and sequence.outgoing is not None
            return not copying
        return sequence.moving in (None, Tier.TO_DISK)


def _failure(report: Moved) -> DjinnError:
    if report.disk_is_full:
        return DiskShort(f"the session's file was not stored: {report.error}")
    return EngineError(f"the export failed: {report.error}")
