"""The one way to a model: from its name, config and weights to a `LayerStack`."""

from __future__ import annotations

import logging

import torch

from app.domain.errors import DjinnError, FieldOutOfRange
from app.gpu.kernels.attention.base import Attention
from app.gpu.kernels.linear.base import WHOLE, MatmulPrecision, Shard
from app.gpu.models.base import LayerStack
from app.gpu.models.feed_forward import acts_alike
from app.gpu.models.layers import activation_name, divided
from app.gpu.models.stack import OwnStack
from app.gpu.models.variants import VARIANTS, has_turned_matrices, is_variant, unread
from app.gpu.weights.bundles import ResidentWeights, Weights
from app.gpu.weights.checkpoint import weights_of
from app.gpu.weights.source import WeightSource
from app.model_store.resolve import ResolvedModel
from app.model_store.saved import Config

logger = logging.getLogger(__name__)

_WITH_TEXT = {"qwen3_5", "qwen3_5_moe", "gemma3", "mistral3"}
"""Models with encoders of images beside a text model of ours, which sees no later tokens where there is no image."""
_KNOWN = ", ".join(sorted(VARIANTS))
UNBOUNDED = 32_768
"""Tokens of a sequence of a model whose config names no limit."""


def load_stack(
    model: ResolvedModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: Attention,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
    products: MatmulPrecision = MatmulPrecision.FLOAT32,
    shard: Shard = WHOLE,
) -> LayerStack:
    """Load all of `model` onto `device` as `dtype`, for sequences of up to `max_model_len` tokens (None: the model's
    own). Of layers and head only what `shard` has, which `require_shards` must have allowed.

    A model type without a family of ours runs on Transformers' modules. Raises FieldOutOfRange for an architecture that
    cannot, or a length the model was not made for; BrokenModel if the weights do not fit the config. `batch_invariant`,
    if the attention is so too: a token's bits do not depend on the batch. FieldOutOfRange where they would.
    """
    if batch_invariant:
        require_row_by_row(model, device)
    if can_be_streamed(model):
        weights = ResidentWeights(device, dtype, batch_invariant=batch_invariant, products=products)
        return build_stack(model, weights_of(model, device, dtype), weights, attention, max_model_len, shard)
    text = _text_of(model)
    left = unread(text) if text.model_type in VARIANTS else []
    if left:
        logger.info("it runs on Transformers' modules: Djinn's layers do not read %s", ", ".join(left))
    from app.gpu.models.transformers import load_transformers_stack  # imports much of Transformers

    try:
        return load_transformers_stack(model, device, dtype, attention, _length(model, max_model_len))
    except DjinnError:
        raise
    except Exception as error:
        # Whatever a foreign architecture trips over, it is this architecture that cannot be run.
        raise FieldOutOfRange(
            f"Djinn cannot run model type {model.config.model_type!r} layer by layer: {error}. "
            f"Known are {_KNOWN}, and decoders whose Transformers modules use its attention "
            "interface or its caches, such as gpt_neox, cohere, opt, falcon and bloom",
            param="model",
        ) from error


def build_stack(
    model: ResolvedModel,
    source: WeightSource,
    weights: Weights,
    attention: Attention,
    max_model_len: int | None,
    shard: Shard = WHOLE,
) -> LayerStack:
    """The stack of `model` whose weights come from `source` and are kept by `weights`. Raises as `load_stack`, and
    FieldOutOfRange for a model type without a family of ours.
    """
    kind = model.config.model_type
    if not can_be_streamed(model):
        raise FieldOutOfRange(
            f"weights_device: {kind!r} runs on Transformers' modules, and Djinn cannot stream their weights. "
            f"Those of {_KNOWN} can",
            param="weights_device",
        )
    length = _length(model, max_model_len)
    return OwnStack(_text_of(model), source, attention, length, weights, shard)


def require_shards(model: ResolvedModel, ranks: int) -> None:
    """Raise FieldOutOfRange unless the layers of `model` can be cut into `ranks` equal parts."""
    kind, vocab = model.config.model_type, _text_of(model).vocab_size
    if not can_be_streamed(model):
        raise FieldOutOfRange(
            f"tensor_parallel must be 1 for {kind!r}, which runs on Transformers' modules; those of {_KNOWN} can be "
            "more",
            param="tensor_parallel",
        )
    counts = divided(_text_of(model))
    if not counts:
        raise FieldOutOfRange(
            f"tensor_parallel must be 1 for {kind!r}, whose layers cannot be cut", param="tensor_parallel"
        )
    allowed = [
        n
        for n in range(1, min(counts) + 1)
        if all(count % n == 0 for count in counts) and -(-vocab // n) * (n - 1) < vocab  # each has some of its rows
    ]
    if ranks not in allowed:
        raise FieldOutOfRange(
            f"tensor_parallel must divide the heads, the KV heads and the MLP's width of {model.name}: "
            f"one of {', '.join(map(str, allowed))}; got {ranks}",
            param="tensor_parallel",
        )


def can_be_streamed(model: ResolvedModel) -> bool:
    """Whether the model runs on layers of ours, and `build_stack` takes it."""
    return is_variant(_text_of(model))


def _text_of(model: ResolvedModel) -> Config:
    """The config of what is served."""
    return model.config.get_text_config() if model.config.model_type in _WITH_TEXT else model.config


def multiplies_blocks(model: ResolvedModel) -> bool:
    """Whether matrices reach the model's layers in the blocks in which they are stored: turned ones do not."""
    return can_be_streamed(model) and not has_turned_matrices(_text_of(model))


def _length(model: ResolvedModel, wanted: int | None) -> int:
    """The longest sequence; FieldOutOfRange if `wanted` is more than the model has positions for."""
    config = model.config.get_text_config()
    own: int = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", UNBOUNDED))
    if wanted is not None and not 2 <= wanted <= own:
        raise FieldOutOfRange(
            f"max_model_len must be between 2 and {own} for {model.name}; got {wanted}", param="max_model_len"
        )
    return own if wanted is None else wanted


def require_row_by_row(model: ResolvedModel, device: torch.device) -> None:
    """Raise FieldOutOfRange unless what lies between matrix products and attention treats every row by itself."""
    reason = why_not_row_by_row(model, device)
    if reason is not None:
        raise FieldOutOfRange(f"batch_invariant: {reason}; models of the Llama family can be", param="batch_invariant")


def why_not_row_by_row(model: ResolvedModel, device: torch.device) -> str | None:
    """Why what lies between matrix products and attention treats rows by their company; None: it does not.

    PyTorch's activations on a CPU do: the last few values of each thread's share take other instructions. Those that
    have a kernel of ours do not.
    """
    kind, text = model.config.model_type, _text_of(model)
    if not can_be_streamed(model):
        return f"{kind!r} runs on Transformers' modules, whose products depend on the batch"
    if device.type == "cpu" and not acts_alike(activation_name(text), VARIANTS[text.model_type].projections):
        return f"the activation of {kind!r} depends on the batch on a CPU"
    return None
