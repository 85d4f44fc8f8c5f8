"""Every setting of the server in one place: the only reader of flags and of the environment (`DJINN_*`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The part of the settings that the engine reads. Sizes in bytes and tokens."""

    device: str
    dtype: str
    kv_bytes: int | None
    block_size: int
    max_step_tokens: int
    max_running: int
    max_model_len: int | None


class Settings(BaseSettings):
    """`djinn serve --help` prints these; `DJINN_<NAME>` sets the same from the environment, a flag wins."""

    model_config = SettingsConfigDict(
        env_prefix="DJINN_",
        frozen=True,
        cli_prog_name="djinn serve",
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_shortcuts={"api-keys": "api-key"},
    )

    host: str = Field("127.0.0.1", description="address to listen on; loopback unless told otherwise")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 picks a free one")
    api_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="comma-separated, or --api-key once for each; if any is set, every route but /health needs one",
    )
    model: str = Field(
        "smollm2-135m-instruct", description="a pulled name, a folder, a .gguf file, a hub id or random:SHAPE"
    )
    served_name: str | None = Field(None, description="the model's name in the API (default: the last part of --model)")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on CPU, bfloat16 on CUDA"
    )
    seed: int = Field(0, ge=0, description="seed of random:SHAPE weights")
    cache_dir: Path = Field(Path("~/.cache/djinn"), description="where pulled models are kept")

    kv_device: ByteSize | None = Field(
        None, description="bytes for KV on the device, such as 2GiB (default: from what is free)"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in one KV block")
    max_step_tokens: int = Field(512, ge=1, description="most tokens computed in one step, over all sessions")
    max_running: int = Field(256, ge=1, description="most sessions in one step")
    max_queue: int = Field(1024, ge=1, description="turns that may wait; one more gets 429")
    max_model_len: int | None = Field(None, ge=2, description="cap on a session's tokens (default: the model's own)")
    max_sessions: int = Field(4096, ge=1, description="sessions that may be open at once")
    max_request_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body")
    drain_timeout_s: float = Field(30.0, ge=0, description="how long SIGTERM waits for running turns")

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        keys = value.split(",") if isinstance(value, str) else value
        if isinstance(keys, list | tuple) and "" in keys:
            raise ValueError("a key must not be empty")
        return tuple(keys) if isinstance(keys, list) else keys

    @model_validator(mode="after")
    def _every_session_gets_its_token(self) -> Self:
        if self.max_running > self.max_step_tokens:
            raise ValueError(
                f"max_running ({self.max_running}) must be at most max_step_tokens ({self.max_step_tokens}): "
                "each running session decodes one token a step"
            )
        return self

    def engine(self) -> EngineSettings:
        """The engine's section."""
        return EngineSettings(
            device=self.device,
            dtype=self.dtype,
            kv_bytes=None if self.kv_device is None else int(self.kv_device),
            block_size=self.block_size,
            max_step_tokens=self.max_step_tokens,
            max_running=self.max_running,
            max_model_len=self.max_model_len,
        )
