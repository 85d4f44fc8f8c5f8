"""All that one server knows of its tenants: the file of `--tenants`, in YAML or in JSON, which is YAML too, and the
audit log of what each did.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from io import FileIO
from math import inf
from pathlib import Path
from typing import Annotated, Any

import orjson
import yaml
from pydantic import Field, PlainValidator, ValidationError
from starlette.types import Scope

from app.domain.errors import FieldOutOfRange
from app.domain.tasks import Tasks
from app.domain.values import Limits
from app.logs import method_of, route_of, session_of
from app.machine.files import counted
from app.settings import Settings
from app.tenants.tenant import Directory, Key, Role, Tenant, TenantQuotas, tenants_of_keys
from app.web.bodies import matched
from app.web.errors import described
from app.web.middleware import Answer
from app.wire.base import WireModel

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
DATE = re.compile(r"\d{4}-\d\d-\d\d")
MOST = 10**12
"""Of any limit: far more than one server does."""
MOST_BYTES = 4 << 20
MOST_NODES = 1 << 20
"""Values of the file, each as often as anchors repeat it: a few anchors of anchors make billions of a short file."""


def _moment(value: object, *, after: timedelta) -> float:
    """Unix seconds of a date or a time; a date is `after` its beginning. Without an offset it is UTC."""
    try:
        if isinstance(value, str):
            value = date.fromisoformat(value) if DATE.fullmatch(value) else datetime.fromisoformat(value)
    except ValueError:
        value = None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):  # the day after the last one that a date can name is a moment too
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp() + after.total_seconds()
    raise ValueError("a date such as 2027-01-31, or a time such as 2027-01-31T18:00:00Z")


Moment = Annotated[float, PlainValidator(partial(_moment, after=timedelta()), json_schema_input_type=str)]
LastMoment = Annotated[float, PlainValidator(partial(_moment, after=timedelta(days=1)), json_schema_input_type=str)]
Amount = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class _Key(WireModel):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    not_before: Moment = -inf
    not_after: LastMoment = inf


class _Limits(WireModel):
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    turns_at_once: Amount | None = None
    sessions: Amount | None = None
    guaranteed_sessions: Count | None = None
    import_bytes: Count | None = None
    device_bytes: Amount | None = None
    host_bytes: Count | None = None


class _Tenant(WireModel):
    name: str = Field(pattern=NAME)
    keys: list[_Key]
    role: Annotated[Role, Field(strict=False)] = Role.USER
    limits: _Limits = _Limits()


class _File(WireModel):
    tenants: list[_Tenant] = Field(min_length=1)


class _Loader(yaml.SafeLoader):
    """Refuses a file that grows, and a mapping that has a field twice: YAML itself would ignore the first."""

    def get_single_node(self) -> yaml.Node | None:
        found: yaml.Node | None = super().get_single_node()
        if found is not None and (count := _count(found, {})) > MOST_NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"with its anchors the file has {count} values; {MOST_NODES} are allowed", found.start_mark
            )
        return found

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a field must have a name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_timestamp(self, node: yaml.ScalarNode) -> Any:
        """Raises an error that says where a date is that no calendar has: PyYAML's own does not."""
        try:
            return super().construct_yaml_timestamp(node)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_timestamp)


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The values in a node, itself included, each as often as it is there. `known` has those of other nodes."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # of a node that contains itself
        parts = node.value if isinstance(node, yaml.SequenceNode) else (each for pair in node.value for each in pair)
        known[id(node)] = 1 + sum(_count(each, known) for each in parts)
    return known[id(node)]


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """The tenants of the file. Raises `FieldOutOfRange`, which names the field at fault by its path."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise _refusal(path, f"it has more than {MOST_BYTES >> 20} MiB")
        content = yaml.load(path.read_bytes(), _Loader)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}") from error
    # ValueError: bytes that are no text; LookupError, AttributeError: PyYAML itself, for `!!bool x`
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _refusal(path, f"invalid YAML{where}: {getattr(error, 'problem', None) or error}") from error
    try:
        found = _File.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        field, words = next(described(_File, error))
        if problem["loc"][-1:] == ("sha256",) and problem["type"] != "missing":
            words = "64 lowercase hexadecimal digits: `djinn keys new` prints them with the key"  # it may be the key
        raise _refusal(path, f"{field}: {words}" if field else f"the file must be {words}") from error
    _check_unique(path, found)
    return tuple(
        Tenant(each.name, tuple(Key(**dict(key)) for key in each.keys), each.role, Limits(**dict(each.limits)))
        for each in found.tenants
    )


def _check_unique(path: Path, file: _File) -> None:
    """Raise `FieldOutOfRange` for a name or a key that two tenants have, or one has twice."""
    seen: dict[str, str] = {}
    for index, tenant in enumerate(file.tenants):
        fields = [(f"tenants.{index}.name", tenant.name)]
        fields += [(f"tenants.{index}.keys.{number}.sha256", key.sha256) for number, key in enumerate(tenant.keys)]
        for field, value in fields:
            if value in seen:
                raise _refusal(path, f"{field}: the same as {seen[value]}")
            seen[value] = field
    for index, tenant in enumerate(file.tenants):
        for number, key in enumerate(tenant.keys):
            if key.not_before >= key.not_after:
                raise _refusal(path, f"tenants.{index}.keys.{number}.not_after: must be later than not_before")


def _refusal(path: Path, problem: str) -> FieldOutOfRange:
    return FieldOutOfRange(f"tenants file {path}: {' '.join(problem.split())}", param="tenants")


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
