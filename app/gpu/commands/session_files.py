"""Exporting sessions to files and importing them."""

from app.domain.errors import BadExport, DiskShort, DjinnError, EngineError
from app.gpu.commands.host_bound import HostBound
from app.gpu.commands.sessions import namespace_hash
from app.gpu.kv.placement import Placement
from app.gpu.state.moves import Move, Moved, MoveKind
from app.gpu.state.sequence import TokenSequence
from app.messages import Done, Event, Export, ExportedKV, Failed, Import, ImportedKV


class SessionFiles:
    """Exports and imports under way. An export first brings the KV to the host, if there is room for it."""

    def __init__(self, placement: Placement, host_bound: HostBound, max_model_len: int) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._host_bound = host_bound
        self._max_model_len = max_model_len
        self._writing: dict[int, Export] = {}
        self._reading: dict[int, tuple[Import, TokenSequence]] = {}

    def export(self, sequence: TokenSequence, command: Export) -> list[Event]:
        """Begin to write the session's file; `finish` answers."""

        def write() -> None:
            move = self._tiers.export(sequence, command.path, command.about)
            self._writing[move.number] = command

        self._host_bound.then(sequence, write)
        return []

    def import_(self, command: Import) -> list[Event]:
        """Begin to check a client's file; `finish` answers."""
        sequence = TokenSequence(command.session, namespace_hash(command.namespace), tenant=command.tenant)
        move = self._tiers.import_file(sequence, command.path, max_tokens=self._max_model_len)
        self._reading[move.number] = command, sequence
        return []

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
        self._placement.adopt(sequence, report.computed, blocks)
        found = ImportedKV(report.token_ids, report.about_at, report.about_bytes)
        return [Done(asked.ticket, found)], sequence


def _failure(report: Moved) -> DjinnError:
    if report.disk_is_full:
        return DiskShort(f"the session's file was not stored: {report.error}")
    return EngineError(f"the export failed: {report.error}")
