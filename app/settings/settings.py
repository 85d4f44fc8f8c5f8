"""Every setting of the server in one place: the only reader of the environment (`DJINN_*`)."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.domain.addresses import LOOPBACK_NAMES, is_host_name, is_loopback, is_origin
from app.domain.errors import FieldOutOfRange
from app.domain.session_ids import REPLICA_NAME
from app.domain.values import KVPolicy
from app.logs.formats import LogFormat
from app.settings.engine import DRAFT_TOKENS, EngineSettings
from app.settings.tracing import check_endpoint, is_traced
from app.settings.values import Budget, none_if_auto, none_or_path, not_empty

CLUSTER_LEASE_S = 15.0
"""A server that is cut off from its folder answers for so long at most, and another one waits a little longer."""
WORDS = {"api_keys": "key", "allowed_hosts": "name", "cors_origins": "origin"}
"""What the settings are lists of."""


def variables() -> dict[str, str]:
    """The settings that the environment gives, by the names of variables without `DJINN_`, in small letters."""
    prefix, of_clients = "DJINN_", "DJINN_URL"
    given = {name: value for name, value in os.environ.items() if name.startswith(prefix) and name != of_clients}
    return {name.removeprefix(prefix).lower(): value for name, value in given.items()}


class Settings(BaseSettings):
    """Each has a flag of `djinn serve`, and `DJINN_<NAME>` sets the same from the environment; a flag wins."""

    model_config = SettingsConfigDict(env_prefix="DJINN_", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on; loopback unless told otherwise")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="comma-separated, or --api-key once for each; if any is set, every route but /health and /ready "
        "needs one",
    )
    tenants: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None,
        description="YAML file with the tenants, their keys, roles and limits; SIGHUP reads it again (default: none)",
    )
    audit_log: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None, description="file that gets a line of JSON for each request; SIGHUP opens it again (default: none)"
    )
    log_format: LogFormat = Field("text", description="of the log on standard error: lines of text, or of JSON")
    access_log: bool = Field(False, description="log a line for each request, without anything that it said")
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector, such as http://127.0.0.1:4318, that gets a span for each turn; "
        "needs djinn[otel] (default: that of the OTEL_* variables, else none)",
    )
    replica: str | None = Field(
        None,
        description="name of this server among others of a cluster, at most 16 of a-z and 0-9, a letter first: ids of "
        "its sessions have it (default: none)",
    )
    peers: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None,
        description="YAML or JSON file with the name and the URL of each server of the cluster; SIGHUP reads it again "
        "(default: none)",
    )
    cluster_key_file: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None, description="file with the secret that the servers of the cluster share, at least 32 characters"
    )
    lease_s: float | None = Field(
        None,
        description="how long the server may serve sessions without writing to --state-dir: then a server on another "
        "machine can take the folder over; 0: none can reach it (default: 15 with --peers, else 0)",
    )
    drain_to: Literal["peers", "disk"] = Field(
        "peers",
        description="where SIGTERM leaves sessions: with the servers of --peers, or here on disk until a restart; "
        "without peers they stay (default: peers)",
    )
    balance: bool = Field(
        True, description="hand sessions that rest to a server of --peers with more room, when memory is nearly full"
    )
    role: Literal["both", "decode", "prefill"] = Field(
        "both",
        description="decode: servers of the cluster whose role is prefill compute its long prompts; both: it computes "
        "its own",
    )
    prefill_apart_tokens: int = Field(
        512, ge=1, description="so many tokens of a prompt without KV make it a long one, with --role decode"
    )
    insecure: bool = Field(False, description="let everybody who reaches a public --host in, without keys")
    allowed_hosts: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None,
        description="comma-separated names that clients may call the server by, * for any (default: those of loopback "
        "if it listens there without keys, else any)",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="comma-separated, or --cors-origin once for each: sites whose pages may use the server, such as "
        "https://example.org; * for any, if callers need a key",
    )
    model: str = Field(
        "smollm2-135m-instruct", description="a pulled name, a folder, a .gguf file, a hub id or random:SHAPE"
    )
    served_name: str | None = Field(None, description="the model's name in the API (default: the last part of --model)")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="GPUs of this machine that share each layer, from that of --device on; its heads and KV heads are "
        "divided evenly. On a CPU: processes, for tests",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, bfloat16 on CUDA"
    )
    weights_dtype: Literal["checkpoint", "float32", "bfloat16", "int8", "float8"] = Field(
        "checkpoint",
        description="as what matrices are kept: any but float8 on a CPU that computes in float32, int8 and float8 on a "
        "GPU",
    )
    matmul_precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="in what a CPU that computes in float32 multiplies; auto: matrices of bfloat16 in bfloat16, where "
        "the processor has instructions for it and --dtype is auto, else float32",
    )
    seed: int = Field(0, ge=0, description="seed of random:SHAPE weights")
    cache_dir: Annotated[Path, BeforeValidator(not_empty)] = Field(
        Path("~/.cache/djinn"), description="where pulled models are kept"
    )

    batch_invariant: bool = Field(
        False, description="a token has the same bits in any batch, paused, swapped or moved: slower"
    )
    cuda_graphs: bool | None = Field(
        None, description="decode as CUDA graphs, cut where a session is being debugged (default: yes, on a GPU)"
    )
    weights_device: Annotated[ByteSize | None, BeforeValidator(none_if_auto)] = Field(
        None,
        description="weights on the device, such as 2GiB; the others are streamed through it each step, layer by "
        "layer. auto: all of them if they fit",
    )
    chunk_size: Annotated[ByteSize, WithJsonSchema({"type": "integer", "minimum": 1 << 20, "maximum": 512 << 20})] = (
        Field(
            ByteSize(16 << 20),
            ge=1 << 20,
            le=512 << 20,
            description="most bytes of one copy of weights that are streamed",
        )
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = Field(
        "auto",
        description="as what KV is kept, in every tier: the type that the model computes in (auto), or a smaller one, "
        "which rounds it",
    )
    kv_device: Budget = Field(
        None, description="KV on the device: bytes such as 2GiB, sessions such as 20x1024, or auto: from what is free"
    )
    kv_host: Budget = Field(
        None, description="KV in host memory, like --kv-device; 0 for none, auto: from what is free"
    )
    kv_disk: Budget = Field(
        None,
        description="KV on disk, like --kv-device; 0 for none, auto: a tenth beside --disk-reserve",
    )
    kv_policy: Literal["signal", "lru", "none"] = Field(
        "signal", description="KV leaves the device on signals, only under pressure (lru), or never (none)"
    )
    state_dir: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        Path("~/.local/state/djinn"), description="where sessions survive a restart; none: nowhere"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in one KV block")
    max_step_tokens: int = Field(512, ge=1, description="most tokens computed in one step, over all sessions")
    max_running: int = Field(256, ge=1, description="most sessions in one step")
    max_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=DRAFT_TOKENS,
        description="most tokens that a session computes ahead in one step, on a guess from its own history; 0 for "
        "none (default: 7 on a CPU where that changes no token)",
    )
    max_queue: int = Field(
        1024, ge=1, description="turns of one tenant that may wait, beside --max-running that run; one more gets 429"
    )
    max_model_len: int | None = Field(None, ge=2, description="cap on a session's tokens (default: the model's own)")
    max_sessions: int = Field(4096, ge=1, description="sessions that may be open at once")
    max_responses: int = Field(
        1024, ge=1, description="responses of /v1/responses that are kept; those unused for longest give way"
    )
    max_responses_bytes: ByteSize = Field(ByteSize(256 << 20), description="what they take as JSON, all together")
    max_connections: int | None = Field(
        None,
        ge=1,
        description="connections that clients may have open at once (default: 8192, or three quarters of the limit of "
        "open files)",
    )
    max_connections_per_address: int | None = Field(
        None, ge=1, description="those from one address (default: half of them, and from loopback all)"
    )
    header_timeout_s: float = Field(10.0, gt=0, description="how long the header of a request may take")
    body_timeout_s: float = Field(30.0, gt=0, description="how long the body of a request may pause")
    write_timeout_s: float = Field(60.0, gt=0, description="how long a client may read nothing of an answer")
    max_request_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body")
    max_bodies_bytes: ByteSize = Field(
        ByteSize(512 << 20), description="memory of the bodies of all requests under way, but for imports"
    )
    max_import_bytes: ByteSize = Field(ByteSize(8 << 30), description="largest session file to import")
    max_spool_bytes: ByteSize = Field(
        ByteSize(16 << 30), description="disk that session files on their way in and out may take together"
    )
    max_logprobs_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="memory of the log-probabilities that turns under way report, all together"
    )
    max_activation_bytes: ByteSize = Field(
        ByteSize(1 << 30), description="host memory that checkpoints of paused turns and captures may take together"
    )
    disk_reserve: ByteSize = Field(
        ByteSize(256 << 20),
        description="disk of --state-dir that is kept free for the journal: KV files give way, exports and imports "
        "are refused",
    )
    park_on_tool_calls: bool = Field(
        True, description="a bound session whose answer calls tools leaves the device by itself until its next call"
    )
    bind_by_prefix: bool = Field(
        False,
        description="bind OpenAI and Anthropic calls without X-Session-ID to the session whose history they continue",
    )
    strict_fields: bool = Field(
        False, description="refuse fields without effect on the OpenAI and Anthropic routes, instead of naming them"
    )
    engine_timeout_s: float = Field(
        120.0, gt=0, description="how long the engine may make no progress before it is ended and started again"
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
        known = {f"DJINN_{name}".upper() for name in cls.model_fields} | {"DJINN_API_KEY", "DJINN_URL"}
        unknown = sorted(name for name in os.environ if name.startswith("DJINN_") and name.upper() not in known)
        if unknown:
            raise ValueError(f"unknown environment variable {' and '.join(unknown)}; see djinn serve --help")
        if "DJINN_API_KEY" in os.environ:
            values.setdefault("api_keys", os.environ["DJINN_API_KEY"])
        return values

    @field_validator("api_keys", "allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _split_words(cls, value: object, info: ValidationInfo) -> object:
        words = value.split(",") if isinstance(value, str) else value
        if isinstance(words, list | tuple) and "" in words:
            what = WORDS[info.field_name or ""]
            raise ValueError(f"empty {what}: each has at least 1 character")
        return tuple(words) if isinstance(words, list) else words

    @field_validator("replica")
    @classmethod
    def _name_a_replica(cls, value: str | None) -> str | None:
        if value is not None and not REPLICA_NAME.fullmatch(value):
            raise ValueError(f"must be at most 16 of a-z and 0-9, a letter first; got {value[:40]!r}")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _only_names(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if name != "*" and not is_host_name(name):
                raise ValueError(f"{name!r} is no host: a name or an address without scheme and port, or * for any")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _only_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not is_origin(origin):
                raise ValueError(f"{origin!r} is no origin: a scheme and a host, such as https://example.org")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _only_collectors(cls, value: str | None) -> str | None:
        check_endpoint(value)
        return value

    @model_validator(mode="after")
    def _a_cluster_is_whole(self) -> Self:
        if (self.peers is None) != (self.cluster_key_file is None):
            there, missing = ("peers", "cluster_key_file") if self.peers else ("cluster_key_file", "peers")
            raise ValueError(f"{there}: needs {missing} beside it")
        if self.peers is not None and self.replica is None:
            raise ValueError("peers: the server itself needs a name, replica")
        if self.peers is not None and self.state_dir is None:
            raise ValueError("peers: sessions that move must survive a restart, and state_dir is none")
        if self.peers is None and self.role != "both":
            raise ValueError("role: needs peers, which compute prompts or have them computed")
        return self

    @model_validator(mode="after")
    def _a_lease_is_of_a_folder(self) -> Self:
        if self.lease_s and not 1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s: 0 for none, or from 1 to 3600; got {self.lease_s:g}")
        if self.lease_s and self.state_dir is None:
            raise ValueError("lease_s: needs a folder to have a lease of, and state_dir is none")
        return self

    @model_validator(mode="after")
    def _every_session_gets_its_token(self) -> Self:
        if self.max_running > self.max_step_tokens:
            raise ValueError(
                f"max_running ({self.max_running}) must be at most max_step_tokens ({self.max_step_tokens}): "
                "each running session decodes one token a step"
            )
        return self

    @model_validator(mode="after")
    def _every_budget_counts(self) -> Self:
        lower = [name for name in ("kv_host", "kv_disk") if getattr(self, name) is not None]
        if self.kv_policy == "none" and lower:
            raise ValueError(f"{' and '.join(lower)}: with kv_policy none KV never leaves the device")
        if self.kv_disk is not None and self.state_dir is None:
            raise ValueError("kv_disk: KV files are kept under state_dir, which is none")
        return self

    def require_safe_access(self) -> None:
        """Raise `FieldOutOfRange` if a server would let strangers in, or if it is not clear whom. Only who serves needs
        this: an image sets a public host for every command.
        """
        if "*" in self.cors_origins and not self.needs_key:
            raise FieldOutOfRange(
                "cors_origins: * would let every page in a browser use a server without keys; name origins",
                param="cors_origins",
            )
        if not (self.needs_key or self.insecure or is_loopback(self.host)):
            raise FieldOutOfRange(
                f"host {self.host} is public: anybody who reaches it could read and close every session; "
                "set --api-keys or --tenants, or --insecure if something in front of the server checks who calls",
                param="host",
            )
        if self.api_keys and self.tenants is not None:
            raise FieldOutOfRange(
                "tenants: the file has all keys, so --api-keys must not be set beside it", param="tenants"
            )

    @property
    def needs_key(self) -> bool:
        """Whether callers need a key."""
        return bool(self.api_keys) or self.tenants is not None

    @property
    def is_traced(self) -> bool:
        """Whether turns are traced: there is a collector, and nothing turns traces off."""
        return is_traced(self.otlp_endpoint)

    @property
    def answered_hosts(self) -> tuple[str, ...]:
        """Names of hosts that the server answers to; `*` is any."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        return ("*",) if self.needs_key or not is_loopback(self.host) else (*LOOPBACK_NAMES, self.host)

    @property
    def lease(self) -> float | None:
        """Seconds of the state folder's lease; None: it has none."""
        found = self.lease_s if self.lease_s is not None else CLUSTER_LEASE_S if self.peers is not None else 0
        return found or None

    @property
    def max_turns(self) -> int:
        """Turns that may run or wait at once."""
        return self.max_running + self.max_queue

    def engine(self) -> EngineSettings:
        """The engine's section."""
        return EngineSettings(
            device=self.device,
            tensor_parallel=self.tensor_parallel,
            dtype=self.dtype,
            matmul_precision=self.matmul_precision,
            batch_invariant=self.batch_invariant,
            cuda_graphs=self.cuda_graphs,
            weights_device=self.weights_device,
            weights_dir=self.cache_dir.expanduser() / "weights",
            chunk_bytes=int(self.chunk_size),
            kv_dtype=self.kv_dtype,
            kv_device=self.kv_device,
            kv_host=self.kv_host,
            kv_disk=self.kv_disk,
            kv_dir=None if self.state_dir is None else self.state_dir.expanduser() / "kv",
            kv_policy=KVPolicy(self.kv_policy),
            block_size=self.block_size,
            max_step_tokens=self.max_step_tokens,
            max_running=self.max_running,
            max_draft_tokens=self.max_draft_tokens,
            max_activation_bytes=int(self.max_activation_bytes),
            max_model_len=self.max_model_len,
        )
