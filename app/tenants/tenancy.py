"""All that one server knows of its tenants, and the audit log of what each did."""

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import orjson
from starlette.types import Scope

from app.domain.errors import FieldOutOfRange
from app.domain.tasks import Tasks
from app.logs import method_of, route_of, session_of
from app.machine.files import counted
from app.settings import Settings
from app.tenants.file import read_tenants
from app.tenants.tenant import Directory, TenantQuotas, tenants_of_keys
from app.web.bodies import matched
from app.web.middleware import Answer

logger = logging.getLogger(__name__)


class AuditLog:
    """A file that lines are appended to. Each is written before the next request is looked at."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds. Raises `FieldOutOfRange` if the file cannot be opened."""
        self._path = path
        self._clock = clock
        try:
            self._file = self._open()
        except OSError as error:
            raise FieldOutOfRange(f"audit_log {path}: {error.strerror}", param="audit_log") from error

    def record(self, scope: Scope, answer: Answer, seconds: float) -> None:
        """Append a line of a request that is over, after so many seconds."""
        self.write(_line(scope, self._clock() - seconds, answer))

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. If that fails, the server goes on, and its own log says so."""
        try:
            written = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
            if self._file.write(written) != len(written):
                raise OSError("only a part of it was written")
        except (OSError, ValueError) as error:  # ValueError: the server has ended, and the file is closed
            logger.error("a line of the audit log %s is lost: %s", self._path, error)

    def reopen(self) -> None:
        """Go on in a new file of that name: the old one has been moved away. Keeps the old one if that fails."""
        try:
            new = self._open()
        except OSError as error:
            logger.error("the audit log %s cannot be reopened, the old file stays: %s", self._path, error.strerror)
            return
        self.close()
        self._file = new

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _open(self) -> FileIO:
        return FileIO(self._path, "a", opener=lambda path, flags: os.open(path, flags, 0o600))


def _line(scope: Scope, began: float, answer: Answer) -> dict[str, Any]:
    """What is written of one request."""
    state, about = scope["state"], matched(scope)
    return {
        "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
        "tenant": state.get("owner"),
        "request_id": state["request_id"],
        "method": method_of(scope),
        "path": route_of(about),
        "session": session_of(about, answer.session),
        "status": answer.status,
    }


class Tenancy:
    """The tenants, their quotas, and the record of what they do. Used on the event loop only."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds. Raises `FieldOutOfRange` for a file that cannot be used."""
        self._file: Path | None = settings.tenants and settings.tenants.expanduser()
        tenants = tenants_of_keys(settings.api_keys) if self._file is None else read_tenants(self._file)
        self.directory = Directory(tenants, clock)
        self.api_keys = {each.name: each.keys[0].sha256 for each in tenants} if self._file is None else {}
        """The SHA-256 digest of each key of `--api-keys`, by the name of its tenant."""
        self.quotas = TenantQuotas(self.directory, clock)
        self.audit = None if settings.audit_log is None else AuditLog(settings.audit_log.expanduser(), clock)
        self._reading = asyncio.Lock()
        self._readings = Tasks()

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
            self._readings.start(self._read_again(self._file))

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
