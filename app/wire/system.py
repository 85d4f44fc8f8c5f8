"""Bodies about the server itself."""

from typing import Literal

from pydantic import BaseModel


class Status(BaseModel):
    """That the server is up."""

    status: Literal["ok", "ready"]


class Version(BaseModel):
    """What runs here. The model computes in `dtype` and its KV is kept as `kv_dtype`. It has `num_layers` layers, a
    residual stream of `hidden_size` numbers, `vocab_size` tokens, and room for `max_model_len` of them in a history.
    """

    version: str
    model: str
    device: str
    dtype: str
    kv_dtype: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
