"""All that one server knows of its tenants."""

import logging
from collections.abc import Callable
from pathlib import Path

from app.domain.errors import FieldOutOfRange
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
        self.quotas = TenantQuotas(self.directory, Windows(clock))
        self.audit = None if settings.audit_log is None else AuditLog(settings.audit_log.expanduser())

    @property
    def has_files(self) -> bool:
        """Whether there is anything to read or open again."""
        return self._file is not None or self.audit is not None

    def close(self) -> None:
        """Let go of the audit log."""
        if self.audit is not None:
            self.audit.close()

    def reload(self) -> None:
        """Read the tenants again, and go on in a new audit log. What cannot be read stays as it was."""
        if self.audit is not None:
            self.audit.reopen()
        if self._file is None:
            return
        try:
            tenants = read_tenants(self._file)
        except FieldOutOfRange as error:
            logger.error("%s; the tenants stay as they were", error.message)
            return
        self.directory.replace(tenants)
        logger.info("tenants file %s: %d tenant%s", self._file, len(tenants), "s" * (len(tenants) > 1))
