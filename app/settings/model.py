"""Settings of the model, and of how it is computed."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from app.settings.values import not_empty


class ModelSettings(BaseModel):
    """Which model, on which device, in which types."""

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
