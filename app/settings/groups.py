"""Settings of who may call the server and of the model, and their values as flags and variables have them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from app.domain.errors import FieldOutOfRange
from app.domain.text import (
    ANY_HOST,
    LOOPBACK_NAMES,
    MODEL_NAME,
    PRIVATE_HOSTS,
    is_host_name,
    is_loopback,
    is_model_name,
    is_origin,
    is_private_name,
)
from app.domain.values import KVBudget
from app.logs import LogFormat


def not_empty(value: object) -> object:
    """Raises `ValueError` for an empty path."""
    if value == "":
        raise ValueError("name a folder; '.' is the current one")
    return value


def none_or_path(value: object) -> object:
    """`none` is None. Raises `ValueError` for an empty path."""
    return None if value == "none" else not_empty(value)


def words(what: str) -> BeforeValidator:
    """Takes words that commas separate, or a list of them, but no empty one. `what` is what each is."""

    def split(value: object) -> object:
        found = value.split(",") if isinstance(value, str) else value
        if isinstance(found, list | tuple) and "" in found:
            raise ValueError(f"empty {what}: each has at least 1 character")
        return tuple(found) if isinstance(found, list) else found

    return BeforeValidator(split)


def none_if_auto(value: object) -> object:
    """`auto` is None."""
    return None if value == "auto" else value


def _parse_budget(value: object) -> KVBudget | None:
    """Bytes as pydantic's `ByteSize` reads them, or `SESSIONSxTOKENS`; `auto` is None."""
    if value is None or isinstance(value, KVBudget):
        return value
    if value == "auto":
        return None
    sessions = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value) if isinstance(value, str) else None
    if sessions is not None:
        return KVBudget(sessions=int(sessions[1]), tokens=int(sessions[2]))
    try:
        size = TypeAdapter(ByteSize).validate_python(value)
    except ValidationError:
        raise ValueError(f"{value!r} is neither auto, nor bytes such as 2GiB, nor sessions such as 20x1024") from None
    if size < 0:
        raise ValueError(f"{value!r} is less than 0 bytes")
    return KVBudget(bytes=int(size))


Budget = Annotated[KVBudget | None, PlainValidator(_parse_budget, json_schema_input_type=str | int)]
"""Bytes, or sessions of so many tokens."""


TRACES_PATH = "/v1/traces"
"""Where a collector takes spans, below its address."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def named_by(endpoint: str | None) -> str:
    """What names the collector: the setting of `endpoint`, or the variable that does without."""
    return "otlp_endpoint" if endpoint is not None else next(filter(variable, ENDPOINTS), ENDPOINTS[-1])


def variable(name: str) -> str:
    """What it says; empty if it is not set."""
    return os.environ.get(name, "").strip()


class AccessSettings(BaseModel):
    """The address, keys, hosts, origins, and the logs."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_keys: Annotated[tuple[str, ...], NoDecode, words("key")] = Field(
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
    log_format: LogFormat = Field("text", description="form of the log on standard error")
    access_log: bool = Field(False, description="log a line for each request, without its content")
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector, such as http://127.0.0.1:4318, that gets a span for each turn; "
        "needs djinn-server[otel] (default: that of the OTEL_* variables, else none)",
    )
    insecure: bool = Field(False, description="accept all callers on a public --host, without keys")
    allowed_hosts: Annotated[tuple[str, ...] | None, NoDecode, words("name")] = Field(
        None,
        description="comma-separated host names of the server; * for any; <private> for addresses and names that no "
        "Internet site can have (default: any with keys; else those of loopback if it listens there, else <private>)",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, words("origin")] = Field(
        (),
        description="comma-separated, or --cors-origin once for each: sites whose pages may use the server, such as "
        "https://example.org; * for any, if callers need a key",
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _only_names(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in value or ():
            if name not in (ANY_HOST, PRIVATE_HOSTS) and not is_host_name(name):
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
        if value is not None:
            url = urlsplit(value)
            if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
                raise ValueError(f"{value!r} is no address of a collector: a URL such as http://127.0.0.1:4318")
            if url.path.rstrip("/").endswith(TRACES_PATH):
                raise ValueError(f"{value!r} must end before {TRACES_PATH}, which Djinn adds")
        return value

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
            raise FieldOutOfRange("tenants: the file has all keys, so --api-keys must not be set too", param="tenants")

    @property
    def needs_key(self) -> bool:
        """Whether callers need a key."""
        return bool(self.api_keys) or self.tenants is not None

    @property
    def is_traced(self) -> bool:
        """Whether turns are traced: there is a collector, from the flag or a variable, and no variable says no."""
        is_off = variable("OTEL_SDK_DISABLED").lower() == "true" or variable("OTEL_TRACES_EXPORTER").lower() == "none"
        return not is_off and (self.otlp_endpoint is not None or any(map(variable, ENDPOINTS)))

    @property
    def answered_hosts(self) -> tuple[str, ...]:
        """Names of hosts that the server answers to. Only callers without keys need the list: a page has none."""
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        if self.needs_key:
            return (ANY_HOST,)
        if is_loopback(self.host):
            return (*LOOPBACK_NAMES, self.host)
        return (PRIVATE_HOSTS,) if is_private_name(self.host) else (PRIVATE_HOSTS, self.host)


class ModelSettings(BaseModel):
    """Which model, on which device, in which types; the device's memory, host memory and the disk."""

    model: str = Field(
        "smollm2-135m-instruct", description="a pulled name, a folder, a .gguf file, a hub id or random:SHAPE"
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode, words("name")] = Field(
        (),
        description="the model's names in the API, separated by spaces or commas; answers tell the first (default: the "
        "last part of --model)",
    )
    lora: Annotated[tuple[str, ...], NoDecode, words("name")] = Field(
        (),
        description="comma-separated, or --lora once for each: LoRA adapters as NAME=FOLDER, where PEFT has written "
        "the folder. A client chooses one as its model",
    )
    lora_dir: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None,
        description="folder from which operators load adapters while the server runs, with POST /v1/models/load "
        "(default: none)",
    )
    max_lora_bytes: ByteSize = Field(
        ByteSize(256 << 20), description="memory of the device for all adapters; with none to come, it is left to KV"
    )
    max_upload_bytes: ByteSize = Field(
        ByteSize(512 << 20),
        description="memory of the device, and disk, for all dictionaries, lenses and probes that clients upload; 0 "
        "for none",
    )
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
        description="data type of the matrices: any but float8 on a CPU that computes in float32, int8 and float8 "
        "on a GPU",
    )
    matmul_precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="precision of products on a CPU that computes in float32; auto: bfloat16 for bfloat16 matrices, "
        "where the processor has instructions for it and --dtype is auto or bfloat16, else float32",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="what temperature, top_p, top_k, min_p and repetition_penalty are where a client leaves them out; "
        "auto: as the model's generation_config.json says; none: neutral values",
    )
    chat_format: Annotated[str | None, BeforeValidator(none_if_auto)] = Field(
        None,
        description="how the model writes thoughts and calls of tools, such as hermes+think or harmony; auto: as its "
        "chat template shows",
    )
    seed: int = Field(0, ge=0, description="seed of random:SHAPE weights")
    cache_dir: Annotated[Path, BeforeValidator(not_empty)] = Field(
        Path("~/.cache/djinn"), description="where pulled models and compiled kernels are kept"
    )
    batch_invariant: bool = Field(
        False, description="the same bits for a token in any batch, paused, swapped or moved; slower"
    )
    cuda_graphs: bool | None = Field(
        None, description="decode as CUDA graphs, cut where a session is being debugged (default: yes, on a GPU)"
    )
    weights_device: Annotated[ByteSize | None, BeforeValidator(none_if_auto)] = Field(
        None,
        description="weights on the device, such as 2GiB; each step streams the others through it, layer by layer. "
        "auto: all of them if they fit",
    )
    chunk_size: Annotated[ByteSize, WithJsonSchema({"type": "integer", "minimum": 1 << 20, "maximum": 512 << 20})] = (
        Field(ByteSize(16 << 20), ge=1 << 20, le=512 << 20, description="largest copy of streamed weights")
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8"] = Field(
        "auto",
        description="data type of KV in every tier: that of the computation (auto), or a smaller one, which rounds KV",
    )
    kv_device: Budget = Field(
        None, description="KV on the device: bytes such as 2GiB, sessions such as 20x1024, or auto: from what is free"
    )
    kv_host: Budget = Field(
        None,
        description="KV in host memory, like --kv-device; 0 for none, and then none on disk, auto: from what is free",
    )
    kv_disk: Budget = Field(
        None,
        description="KV on disk, like --kv-device; it goes there over host memory, so --kv-host must not be 0. 0 for "
        "none, auto: a tenth of the free space above --disk-reserve",
    )
    kv_policy: Literal["signal", "lru", "none"] = Field(
        "signal", description="KV leaves the device on signals (signal), only under pressure (lru), or never (none)"
    )
    state_dir: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        Path("~/.local/state/djinn"), description="folder in which sessions survive a restart; none: no folder"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in one KV block")

    @field_validator("lora")
    @classmethod
    def _only_adapters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if not word.partition("=")[2]:
                raise ValueError(f"{word[:80]!r} is not NAME=FOLDER")
        return value

    @model_validator(mode="after")
    def _names_are_different(self) -> Self:
        _require_names([*self.served_model_name, *(word.partition("=")[0] for word in self.lora)])
        return self

    @model_validator(mode="after")
    def _every_budget_counts(self) -> Self:
        lower = [name for name in ("kv_host", "kv_disk") if getattr(self, name) is not None]
        if self.kv_policy == "none" and lower:
            raise ValueError(f"{' and '.join(lower)}: with kv_policy none KV never leaves the device")
        if self.kv_disk not in (None, KVBudget()) and self.state_dir is None:
            raise ValueError("kv_disk: KV files are kept under state_dir, which is none")
        if self.kv_host == KVBudget() and self.kv_disk not in (None, KVBudget()):
            raise ValueError("kv_disk: KV goes to disk over host memory, so kv_host must not be 0")
        return self


def _require_names(names: Sequence[str]) -> None:
    for name in names:
        if not is_model_name(name):
            raise ValueError(f"{name[:80]!r} is no name of a model: {MODEL_NAME}")
        if names.count(name) > 1:
            raise ValueError(f"served_model_name and lora: {name!r} is there twice")
