"""Settings of where weights and KV are, and how much of them."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, WithJsonSchema, model_validator

from app.domain.values import KVBudget
from app.settings.values import Budget, none_if_auto, none_or_path


class MemorySettings(BaseModel):
    """The device, host memory and the disk."""

    weights_device: Annotated[ByteSize | None, BeforeValidator(none_if_auto)] = Field(
        None,
        description="weights on the device, such as 2GiB; each step streams the others through it, layer by layer. "
        "auto: all of them if they fit",
    )
    chunk_size: Annotated[ByteSize, WithJsonSchema({"type": "integer", "minimum": 1 << 20, "maximum": 512 << 20})] = (
        Field(
            ByteSize(16 << 20),
            ge=1 << 20,
            le=512 << 20,
            description="largest copy of streamed weights",
        )
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

    @model_validator(mode="after")
    def _every_budget_counts(self) -> Self:
        lower = [name for name in ("kv_host", "kv_disk") if getattr(self, name) is not None]
        if self.kv_policy == "none" and lower:
            raise ValueError(f"{' and '.join(lower)}: with kv_policy none KV never leaves the device")
        if self.kv_disk is not None and self.state_dir is None:
            raise ValueError("kv_disk: KV files are kept under state_dir, which is none")
        if self.kv_host == KVBudget() and self.kv_disk not in (None, KVBudget()):
            raise ValueError("kv_disk: KV goes to disk over host memory, so kv_host must not be 0")
        return self
