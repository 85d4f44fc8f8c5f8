"""Settings of the model, how it is computed, and where its weights and KV are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ByteSize, Field, WithJsonSchema, field_validator, model_validator
from pydantic_settings import NoDecode

from app.domain.text import MODEL_NAME, is_model_name
from app.domain.values import KVBudget
from app.settings.values import Budget, none_if_auto, none_or_path, not_empty, words


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
