"""Settings of who may call the server, where it listens, and what it writes of that."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from app.domain.errors import FieldOutOfRange
from app.domain.text import (
    ANY_HOST,
    LOOPBACK_NAMES,
    PRIVATE_HOSTS,
    is_host_name,
    is_loopback,
    is_origin,
    is_private_name,
)
from app.logs import LogFormat
from app.settings.values import ENDPOINTS, TRACES_PATH, none_or_path, variable, words


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
