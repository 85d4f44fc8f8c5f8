"""In which type a CPU multiplies."""

import torch

from app.domain.errors import FieldOutOfRange
from app.domain.values import WeightsDtype
from app.gpu.device.choice import dtype_name
from app.gpu.kernels.linear.base import MatmulPrecision
from app.gpu.models import can_be_streamed
from app.model_store.resolve import ResolvedModel
from app.settings import EngineSettings

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"


def choose_products(
    settings: EngineSettings, model: ResolvedModel, device: torch.device, dtype: torch.dtype
) -> MatmulPrecision:
    """What `settings.matmul_precision` comes to on this machine. `auto` keeps float32, unless the processor has an
    instruction for bfloat16, and no data type was requested or just that.

    Raises FieldOutOfRange for bfloat16 where another part of PyTorch multiplies.
    """
    asked = settings.matmul_precision
    ours = device.type == "cpu" and can_be_streamed(model)
    if asked == AUTO and ours and dtype is torch.bfloat16 and _has_instruction():
        return MatmulPrecision.BFLOAT16
    ours = ours and dtype is torch.float32
    if asked == BFLOAT16 and not ours:
        raise FieldOutOfRange(
            "matmul_precision must be auto or float32; got bfloat16: it is for models of the Llama family and GPT-2 on "
            f"a CPU that computes in float32; {model.config.model_type!r} runs in {dtype_name(dtype)} on {device}",
            param="matmul_precision",
        )
    if not ours or asked == FLOAT32 or (asked == AUTO and (settings.dtype != AUTO or not _has_instruction())):
        return MatmulPrecision.FLOAT32
    return MatmulPrecision.BFLOAT16 if asked == BFLOAT16 else MatmulPrecision.AS_KEPT


def attends_in_bfloat16(model: ResolvedModel, products: MatmulPrecision) -> bool:
    """Whether prompts attend in bfloat16: those of a model whose matrices are all multiplied in it. Its config says in
    which type a checkpoint has them.
    """
    if products is not MatmulPrecision.AS_KEPT:
        return products is MatmulPrecision.BFLOAT16
    if model.weights_dtype is WeightsDtype.CHECKPOINT:
        said = getattr(model.config, "dtype", None)  # of a GGUF file a word, or nothing
        return str(said).removeprefix("torch.") == BFLOAT16
    return model.weights_dtype is WeightsDtype.BFLOAT16


def _has_instruction() -> bool:
    from app.gpu.kernels.cpu.tiles import multiplies_pairs  # imports Numba, which only a CPU needs

    return multiplies_pairs()
