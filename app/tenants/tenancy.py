"""All that one server knows of its tenants."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.machine.units import counted
from app.settings import Settings
from app.tenants.audit import AuditLog
from app.tenants.directory import Directory, tenants_of_keys
from app.tenants.file import read_tenants
from app.tenants.quotas import TenantQuotas
from app.tenants.windows import Windows

logger = logging.getLogger(__name__)


class Tenancy:
    """The tenants, their quotas, and the record of what they do. Used on the event loop only."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds. Raises `FieldOutOfRange` for a file that cannot be used."""
        self.clock = clock
        self._file: Path | None = settings.tenants and settings.tenants.expanduser()
        tenants = tenants_of_keys(settings.api_keys) if self._file is None else read_tenants(self._file)
        self.directory = Directory(tenants, clock)
        self.api_keys = {each.name: each.keys[0].sha256 for each in tenants} if self._file is None else {}
        """The SHA-256 digest of each key of `--api-keys`, by the name of its tenant."""
        self.quotas = TenantQuotas(self.directory, Windows(clock))
        self.audit = None if settings.audit_log is None else AuditLog(settings.audit_log.expanduser())
        self._reading = asyncio.Lock()
        self._readings: set[asyncio.Task[None]] = set()

    @property
    def old_names(self) -> dict[str, str]:
        """The names that older versions gave the tenants of `--api-keys`: the first half of the key's digest."""
        return {name: sha256[: len(sha256) // 2] for name, sha256 in self.api_keys.items()}

    @property
    def has_files(self) -> bool:
        """Whether there is anything to read or open again."""
        return self._file is not None or self.audit is not None

    def close(self) -> None:
        """Let go of the audit log."""
        if self.audit is not None:
            self.audit.close()

    def reload(self) -> None:
        """Begin to read the tenants again, and go on in a new audit log. What cannot be read stays as it was."""
        if self.audit is not None:
            self.audit.reopen()
        if self._file is not None:
            reading = asyncio.create_task(self._read_again(self._file))
            self._readings.add(reading)
            reading.add_done_callback(self._readings.discard)

    async def _read_again(self, file: Path) -> None:
        async with self._reading:  # one after the other: what was read last holds
            try:
                # A file of a thousand tenants takes seconds, in which every stream would stop.
                tenants = await asyncio.to_thread(read_tenants, file)
            except FieldOutOfRange as error:
                logger.error("%s; the tenants stay as they were", error.message)
                return
            self.directory.replace(tenants)
        logger.info("tenants file %s: %s", file, counted(len(tenants), "tenant"))
