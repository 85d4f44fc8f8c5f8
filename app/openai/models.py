"""The bodies of `/v1/models`."""

from typing import Literal

from pydantic import BaseModel

from app.wire.base import View


class DefaultSampling(View):
    """What the fields of these names are in a call that leaves them out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(BaseModel):
    """A served model. `created` is when the server loaded it, in Unix seconds; `max_model_len` is vLLM's addition.

    Breakpoints are after layers 0 to `layers` - 1, where the residual stream has `hidden_size` elements a position.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["djinn"] = "djinn"
    max_model_len: int
    layers: int
    hidden_size: int
    default_sampling: DefaultSampling


class ModelList(BaseModel):
    """All served models: one."""

    object: Literal["list"] = "list"
    data: list[Model]
