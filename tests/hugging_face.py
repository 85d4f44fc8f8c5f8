"""The models of `random:SHAPE` as Transformers has them."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from app.model_store import shapes


def shape_config(shape: str) -> PretrainedConfig:
    """That of `shape`, with Transformers' defaults for all that the shape does not name."""
    found: Any = shapes.shape_config(shape)
    config: PretrainedConfig = AutoConfig.for_model(**found.to_dict())
    return config


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token b is byte b."""
    found = shapes.byte_tokenizer(vocab_size)
    template: Any = found.chat_template
    return PreTrainedTokenizerFast(tokenizer_object=found.backend, chat_template=template, **dict(found.special_tokens))
