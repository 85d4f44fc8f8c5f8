"""How this machine runs a model: on which device, in which types, with which kernels, with or without drafts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.device.hardware import choose_device, choose_dtype, choose_kv_dtype, dtype_name
from app.gpu.kernels.attention import attention_for, tokens_alike
from app.gpu.kernels.attention.base import Attention
from app.gpu.kernels.linear import sums_rows_alike
from app.gpu.kernels.linear.base import WHOLE, MatmulPrecision, Shard
from app.gpu.models import build_stack, can_be_streamed, load_stack, multiplies_blocks, why_not_row_by_row
from app.gpu.models.base import LayerStack
from app.gpu.weights.bundles import Weights
from app.gpu.weights.source import WeightSource
from app.model_store.resolve import ResolvedModel
from app.settings import DRAFT_TOKENS, EngineSettings

logger = logging.getLogger(__name__)

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model and all that decides its bits. Every process that runs a part of the model gets the same."""

    model: ResolvedModel
    settings: EngineSettings
    device: torch.device
    dtype: torch.dtype
    """In which layers compute."""
    kv_dtype: torch.dtype
    products: MatmulPrecision

    @staticmethod
    def choose(model: ResolvedModel, settings: EngineSettings) -> Recipe:
        """What the settings come to on this machine. Raises FieldOutOfRange for one that does not fit the others."""
        device = choose_device(settings.device)
        dtype = choose_dtype(settings.dtype, device)
        kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
        require_weights_dtype(model, device, dtype)
        return Recipe(model, settings, device, dtype, kv_dtype, choose_products(settings, model, device, dtype))

    @property
    def attends_in_bfloat16(self) -> bool:
        """Whether prompts are multiplied in bfloat16."""
        return not self.settings.batch_invariant and attends_in_bfloat16(self.model, self.products)

    @property
    def attention(self) -> Attention:
        """The backend."""
        batch_invariant = self.settings.batch_invariant
        return attention_for(self.device, batch_invariant=batch_invariant, in_bfloat16=self.attends_in_bfloat16)

    def load_stack(self, shard: Shard = WHOLE) -> LayerStack:
        """The layers that `shard` has, with their weights on the device. Raises as `models.load_stack`."""
        return load_stack(
            self.model,
            device=self.device,
            dtype=self.dtype,
            attention=self.attention,
            max_model_len=self.settings.max_model_len,
            batch_invariant=self.settings.batch_invariant,
            products=self.products,
            shard=shard,
        )

    def build_stack(self, source: WeightSource, weights: Weights) -> LayerStack:
        """The layers with weights from `source`, kept by `weights`. Raises as `models.build_stack`."""
        return build_stack(self.model, source, weights, self.attention, self.settings.max_model_len)


def choose_products(
    settings: EngineSettings, model: ResolvedModel, device: torch.device, dtype: torch.dtype
) -> MatmulPrecision:
    """What `settings.matmul_precision` comes to on this machine. `auto` keeps float32, unless the processor is
    faster in bfloat16, and no data type was requested or just that.

    Raises FieldOutOfRange for bfloat16 where another part of PyTorch multiplies.
    """
    asked = settings.matmul_precision
    ours = device.type == "cpu" and can_be_streamed(model) and dtype in (torch.float32, torch.bfloat16)
    if asked == AUTO and ours and dtype is torch.bfloat16 and _is_fast_in_bfloat16():
        return MatmulPrecision.BFLOAT16
    if asked == BFLOAT16 and not ours:
        raise FieldOutOfRange(
            "matmul_precision must be auto or float32; got bfloat16: it is for families of Djinn's own on a CPU that "
            f"computes in float32 or bfloat16; {model.config.model_type!r} runs in {dtype_name(dtype)} on {device}",
            param="matmul_precision",
        )
    if not ours or asked == FLOAT32 or (asked == AUTO and (settings.dtype != AUTO or not _is_fast_in_bfloat16())):
        return MatmulPrecision.FLOAT32
    return MatmulPrecision.BFLOAT16 if asked == BFLOAT16 else MatmulPrecision.AS_KEPT


def attends_in_bfloat16(model: ResolvedModel, products: MatmulPrecision) -> bool:
    """Whether prompts attend in bfloat16: those of a model whose matrices are all multiplied in it. Its config says in
    which type a checkpoint has them; quantized ones are multiplied in float32.
    """
    if products is not MatmulPrecision.AS_KEPT:
        return products is MatmulPrecision.BFLOAT16
    if model.weights_dtype is WeightsDtype.CHECKPOINT:
        if getattr(model.config, "quantization_config", None) is not None:
            return False
        said = getattr(model.config, "dtype", None)  # of a GGUF file a word, or nothing
        return str(said).removeprefix("torch.") == BFLOAT16
    return model.weights_dtype is WeightsDtype.BFLOAT16


def _is_fast_in_bfloat16() -> bool:
    from app.gpu.kernels.cpu.amx import bfloat16_is_fast  # imports Numba, which only a CPU needs

    return bfloat16_is_fast()


FLOAT8_CAPABILITY = (8, 9)
"""Devices have instructions for float8 from this one on."""


def require_weights_dtype(model: ResolvedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise FieldOutOfRange unless matrices are multiplied as the model's `weights_dtype` by layers that compute in
    `dtype` on `device`.
    """
    asked = model.weights_dtype
    if asked in (WeightsDtype.CHECKPOINT, dtype_name(dtype)):
        return
    if asked is WeightsDtype.FLOAT8:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        require_float8(device, dtype, capability)
    if not can_be_streamed(model):
        why = f"{model.config.model_type!r} runs on Transformers' modules, which multiply as {dtype_name(dtype)}"
    elif device.type == "cpu" and dtype is torch.float32:
        return
    elif device.type == "cpu" or asked not in (WeightsDtype.INT8, WeightsDtype.FLOAT8):
        why = f"{device} multiplies matrices as {dtype_name(dtype)}"
    elif dtype is torch.float32:
        why = f"{device} multiplies float32 with float32"
    elif not multiplies_blocks(model):
        why = f"the matrices of {model.config.model_type!r} are stored with their inputs as rows"
    else:
        return
    raise FieldOutOfRange(
        f"weights_dtype must be checkpoint or {dtype_name(dtype)}; got {asked}: {why}", param="weights_dtype"
    )


def require_float8(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] | None) -> None:
    """Raise FieldOutOfRange unless a device of that compute capability, None for a CPU, multiplies float8 for layers
    that compute in `dtype`. PyTorch scales rows on every such device for results in bfloat16.
    """
    least = ".".join(map(str, FLOAT8_CAPABILITY))
    if capability is None or capability < FLOAT8_CAPABILITY:
        found = device if capability is None else f"{device} has {'.'.join(map(str, capability))}"
        why = f"a GPU of compute capability {least} or newer; {found}"
    elif dtype is not torch.bfloat16:
        why = f"dtype bfloat16; got {dtype_name(dtype)}"
    else:
        return
    raise FieldOutOfRange(f"weights_dtype: float8 needs {why}", param="weights_dtype")


def choose_draft_tokens(model: ResolvedModel, settings: EngineSettings, device: torch.device) -> int:
    """Most drafted tokens of one row; 0: none. Raises FieldOutOfRange if drafts are asked for where they could change a
    token.
    """
    asked = settings.max_draft_tokens
    if asked == 0:
        return 0
    reason = _why_not(model, settings, device)
    if asked is not None and reason is not None:
        raise FieldOutOfRange(
            f"max_draft_tokens must be 0: drafts could change tokens, as {reason}", param="max_draft_tokens"
        )
    if asked is None and reason is None and device.type != "cpu":
        reason = f"on {device} they cost the overlap of steps and CUDA graphs; max_draft_tokens turns them on"
    if reason is not None:
        logger.info("drafts: none, as %s", reason)
        return 0
    return DRAFT_TOKENS if asked is None else asked


def _why_not(model: ResolvedModel, settings: EngineSettings, device: torch.device) -> str | None:
    """Why a token's bits could depend on the tokens beside it; None: they do not."""
    reason = why_not_row_by_row(model, device)
    if reason is not None:
        return reason
    if not sums_rows_alike(device, batch_invariant=settings.batch_invariant):
        return "matrix products depend on the batch; with batch_invariant they do not"
    if tokens_alike(device, batch_invariant=settings.batch_invariant) <= DRAFT_TOKENS:
        return "attention depends on the batch; with batch_invariant it does not"
    return None
