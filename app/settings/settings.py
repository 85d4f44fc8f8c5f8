"""Every setting of the server together: the only reader of the environment (`DJINN_*`)."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.domain.homes import REPLICA_NAME
from app.domain.text import is_loopback
from app.domain.values import KVBudget, KVPolicy
from app.settings.groups import AccessSettings, ModelSettings, none_or_path

DRAFT_TOKENS = 7
"""Most drafted tokens of one row: it has eight then, which attention on a CPU still takes one by one."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The part of the settings that the engine reads. Sizes in bytes and tokens."""

    device: str
    tensor_parallel: int
    """Processes that the model's layers are cut over, each on a device of its own."""
    dtype: str
    matmul_precision: str
    """`auto`, `float32` or `bfloat16`."""
    batch_invariant: bool
    cuda_graphs: bool | None
    """None: where the device is a GPU."""
    weights_device: int | None
    """None: all of them if they fit."""
    weights_dir: Path
    """Where a CPU's host copy of weights that are streamed is kept."""
    chunk_bytes: int
    """Of one copy to the device."""
    kv_dtype: str
    """`auto`, `float32`, `bfloat16` or `float16`."""
    kv_device: KVBudget | None
    """None, here and for the next two: from what is free."""
    kv_host: KVBudget | None
    kv_disk: KVBudget | None
    kv_dir: Path | None
    """Where KV files are kept; None: there is no disk tier."""
    kv_policy: KVPolicy
    block_size: int
    max_step_tokens: int
    max_running: int
    max_draft_tokens: int | None
    """None: `DRAFT_TOKENS` where drafts change no token, and help."""
    max_activation_bytes: int
    """Of checkpoints and captures in host memory."""
    max_model_len: int | None
    lora: tuple[tuple[str, str], ...]
    """Names and folders of adapters that are loaded with the model."""
    lora_bytes: int
    """Most that adapters may take; 0: there are none."""
    upload_bytes: int
    """Most that dictionaries, lenses and probes may take."""


class LimitSettings(BaseModel):
    """Limits of turns, sessions, connections, requests and files."""

    max_step_tokens: int = Field(512, ge=1, description="most tokens computed in one step, over all sessions")
    max_running: int = Field(256, ge=1, description="most sessions in one step")
    max_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=DRAFT_TOKENS,
        description="most tokens that a session drafts from its history in one step; 0 for none (default: 7 on a CPU "
        "where that changes no token)",
    )
    max_queue: int = Field(
        1024, ge=1, description="waiting turns of one tenant, in addition to --max-running; more get 429"
    )
    max_model_len: int | None = Field(None, ge=2, description="cap on a session's tokens (default: the model's own)")
    max_sessions: int = Field(4096, ge=1, description="sessions that may be open at once")
    max_responses: int = Field(
        1024, ge=1, description="kept responses of /v1/responses; the least recently used are forgotten"
    )
    max_responses_bytes: ByteSize = Field(ByteSize(256 << 20), description="bytes of all kept responses, as JSON")
    max_connections: int | None = Field(
        None,
        ge=1,
        description="connections that clients may have open at once (default: 8192, or three quarters of the limit of "
        "open files)",
    )
    max_connections_per_address: int | None = Field(
        None, ge=1, description="open connections from one address (default: half of all, from loopback all)"
    )
    header_timeout_s: float = Field(10.0, gt=0, description="how long the header of a request may take")
    body_timeout_s: float = Field(30.0, gt=0, description="how long the body of a request may pause")
    write_timeout_s: float = Field(60.0, gt=0, description="how long a client may read nothing of an answer")
    max_request_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body")
    max_bodies_bytes: ByteSize = Field(
        ByteSize(512 << 20), description="memory for the bodies of all requests in flight, without imports"
    )
    max_import_bytes: ByteSize = Field(ByteSize(8 << 30), description="largest session file to import")
    max_spool_bytes: ByteSize = Field(ByteSize(16 << 30), description="disk for all exports and imports in flight")
    max_files_bytes: ByteSize = Field(
        ByteSize(16 << 30), description="disk for all files of /v1/files, with the results of batches"
    )
    max_logprobs_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="memory for the log-probabilities of all turns in flight"
    )
    max_activation_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="host memory for checkpoints of paused turns and for captures"
    )
    disk_reserve: ByteSize = Field(
        ByteSize(256 << 20),
        description="free disk of --state-dir for the journal: Djinn deletes KV files for it, and refuses exports and "
        "imports",
    )

    @model_validator(mode="after")
    def _every_session_gets_its_token(self) -> Self:
        if self.max_running > self.max_step_tokens:
            raise ValueError(
                f"max_running ({self.max_running}) must be at most max_step_tokens ({self.max_step_tokens}): "
                "each running session decodes one token a step"
            )
        return self

    @property
    def max_turns(self) -> int:
        """Turns that may run or wait at once."""
        return self.max_running + self.max_queue


EVERY_ADDRESS = ("0.0.0.0", "::")
"""What a server listens on that is told no address of its own: no other server can ask for it by that."""
CLUSTER_LEASE_S = 15.0
"""A server that is cut off from its folder answers for so long at most, and another one waits a little longer."""


class ClusterSettings(BaseModel):
    """The server's name, the cluster that it joins, and what it does for the others."""

    replica: str | None = Field(
        None,
        description="name of this server in its cluster, at most 16 of a-z and 0-9, a letter first; part of its "
        "sessions' ids (default: none)",
    )
    cluster: str | None = Field(
        None,
        description="where the servers of the cluster know each other from: etcd://HOST:PORT[,HOST:PORT], or "
        "folder:PATH for servers of one machine (default: none)",
    )
    advertise: str | None = Field(
        None,
        description="URL by which other servers of the cluster reach this one (default: http:// with --host and "
        "--port)",
    )
    cluster_key_file: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None, description="file with the secret that the servers of the cluster share, at least 32 characters"
    )
    lease_s: float | None = Field(
        None,
        description="how long the server may serve sessions without writing to --state-dir; then another machine can "
        "take the folder over; 0: no lease (default: 15 with --cluster, else 0)",
    )
    drain_to: Literal["peers", "disk"] = Field(
        "peers",
        description="where SIGTERM leaves sessions: with the other servers of --cluster, or here on disk until a "
        "restart; without others they stay (default: peers)",
    )
    balance: bool = Field(
        True, description="move resting sessions to a server of --cluster with more room, when memory is nearly full"
    )
    role: Literal["both", "decode", "prefill"] = Field(
        "both",
        description="decode: prefill servers of the cluster compute its long prompts; prefill: it computes those of "
        "others; both: it computes its own",
    )
    prefill_apart_tokens: int = Field(
        512, ge=1, description="with --role decode, tokens without KV from which a prompt is long"
    )

    @field_validator("replica")
    @classmethod
    def _name_a_replica(cls, value: str | None) -> str | None:
        if value is not None and not REPLICA_NAME.fullmatch(value):
            raise ValueError(f"must be at most 16 of a-z and 0-9, a letter first; got {value[:40]!r}")
        return value

    @field_validator("advertise")
    @classmethod
    def _advertise_a_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            is_good = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError(f"must be a URL such as http://10.0.0.1:8000, without a path; got {value[:100]!r}")
        return value.rstrip("/")

    @property
    def lease(self) -> float | None:
        """Seconds of the state folder's lease; None: it has none."""
        found = self.lease_s if self.lease_s is not None else CLUSTER_LEASE_S if self.cluster is not None else 0
        return found or None


OF_CLIENTS = "DJINN_BASE_URL"
"""The variable that tells clients where a server is. The server ignores it."""


def variables() -> dict[str, str]:
    """The settings that the environment gives, by the names of variables without `DJINN_`, in small letters."""
    prefix = "DJINN_"
    given = {name: value for name, value in os.environ.items() if name.startswith(prefix) and name != OF_CLIENTS}
    return {name.removeprefix(prefix).lower(): value for name, value in given.items()}


# Flags are in the order of fields, and those of the last base come first.
class Settings(LimitSettings, ModelSettings, ClusterSettings, AccessSettings, BaseSettings):
    """Each has a flag of `djinn serve`, and `DJINN_<NAME>` sets the same from the environment; a flag wins.

    Here are those of no group, and the rules that hold between groups.
    """

    model_config = SettingsConfigDict(env_prefix="DJINN_", frozen=True)

    park_on_tool_calls: bool = Field(
        True, description="offload a bound session whose answer calls tools, until its next call"
    )
    bind_by_prefix: bool | None = Field(
        None,
        description="bind OpenAI and Anthropic calls without X-Session-ID to the session whose history they continue "
        "(default: yes; no for a server with --replica)",
    )
    strict_fields: bool = Field(
        False, description="refuse fields without effect on the OpenAI and Anthropic routes, instead of naming them"
    )
    engine_timeout_s: float = Field(
        120.0, gt=0, description="how long the engine may make no progress before the server replaces it"
    )
    engine_stuck_s: float = Field(
        60.0,
        gt=0,
        description="how long the engine may take for one layer or step before its turns fail and /ready answers 503",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="how long SIGTERM waits for running turns, and for KV on its way to disk"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_odd_variables(cls, values: dict[str, object]) -> dict[str, object]:
        """`DJINN_API_KEY` is taken for `DJINN_API_KEYS`; a variable that neither a setting nor a client reads is a
        mistake.
        """
        known = {f"DJINN_{name}".upper() for name in cls.model_fields} | {"DJINN_API_KEY", OF_CLIENTS}
        unknown = sorted(name for name in os.environ if name.startswith("DJINN_") and name.upper() not in known)
        if unknown:
            raise ValueError(f"unknown environment variable {' and '.join(unknown)}; see djinn serve --help")
        if "DJINN_API_KEY" in os.environ:
            values.setdefault("api_keys", os.environ["DJINN_API_KEY"])
        return values

    @model_validator(mode="after")
    def _a_cluster_is_whole(self) -> Self:
        if (self.cluster is None) != (self.cluster_key_file is None):
            there, missing = ("cluster", "cluster_key_file") if self.cluster else ("cluster_key_file", "cluster")
            raise ValueError(f"{there}: needs {missing} beside it")
        if self.cluster is not None and self.replica is None:
            raise ValueError("cluster: the server itself needs a name, replica")
        if self.cluster is not None and self.state_dir is None:
            raise ValueError("cluster: sessions that move must survive a restart, and state_dir is none")
        if self.cluster is None and self.role != "both":
            raise ValueError("role: needs cluster, whose servers compute prompts for each other")
        if self.cluster is None and self.advertise is not None:
            raise ValueError("advertise: needs cluster, whose servers it is told to")
        if self.cluster is None or self.advertise is not None:
            return self
        if is_loopback(self.host) and not _is_on_this_machine(self.cluster):
            raise ValueError(
                f"advertise: servers on other machines cannot reach this one at {self.host}: set host, or say how"
            )
        if self.host in EVERY_ADDRESS or not self.port:
            raise ValueError(
                f"advertise: other servers cannot reach this one at {self.host}, port {self.port}: say how they can"
            )
        return self

    @model_validator(mode="after")
    def _a_lease_is_of_a_folder(self) -> Self:
        if self.lease_s and not 1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s: 0 for none, or from 1 to 3600; got {self.lease_s:g}")
        if self.lease_s and self.state_dir is None:
            raise ValueError("lease_s: needs a folder to have a lease of, and state_dir is none")
        return self

    @property
    def url(self) -> str:
        """Where other servers of the cluster reach this one."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return self.advertise or f"http://{shown}:{self.port}"

    @property
    def binds_by_prefix(self) -> bool:
        """Whether calls are bound by their history. In a cluster the next call may come to another server."""
        return self.replica is None if self.bind_by_prefix is None else self.bind_by_prefix

    def engine(self) -> EngineSettings:
        """The engine's section: settings of the same name as they are, and those that follow from others."""
        named = {each.name for each in fields(EngineSettings)} & Settings.model_fields.keys()
        derived = {
            "weights_dir": self.cache_dir.expanduser() / "weights",
            "chunk_bytes": int(self.chunk_size),
            "kv_dir": None if self.state_dir is None else self.state_dir.expanduser() / "kv",
            "kv_policy": KVPolicy(self.kv_policy),
            "max_activation_bytes": int(self.max_activation_bytes),
            "lora": tuple(
                (name, str(Path(folder).expanduser().absolute()))
                for name, _, folder in (word.partition("=") for word in self.lora)
            ),
            "lora_bytes": int(self.max_lora_bytes) if self.lora or self.lora_dir else 0,
            "upload_bytes": int(self.max_upload_bytes),
        }
        return EngineSettings(**{**{name: getattr(self, name) for name in named}, **derived})


def _is_on_this_machine(cluster: str) -> bool:
    """Whether the store of that address is: so are all replicas then, as far as is known."""
    parts = urlsplit(cluster)
    hosts = parts.netloc.rpartition("@")[2].split(",")
    return not parts.scheme.startswith("etcd") or all(
        is_loopback(each.rpartition(":")[0].strip("[]")) for each in hosts
    )
