"""A byte-level tokenizer built in code, for models with random weights: no file, any vocabulary size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 256, 257, 258, 259
_SPECIAL = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB_SIZE = 256 + len(_SPECIAL)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character for each byte 0..255 in a byte-level vocabulary, as GPT-2 chose it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Token b is byte b; then the four special tokens; every further id below `vocab_size` decodes to `<id>`.

    Encoding never produces those further tokens: they are there so that whatever a random model samples
    has a text. `vocab_size` is at least `MIN_VOCAB_SIZE`.
    """
    from transformers import PreTrainedTokenizerFast

    texts = [*byte_alphabet(), *_SPECIAL, *(f"<{token_id}>" for token_id in range(MIN_VOCAB_SIZE, vocab_size))]
    backend = Tokenizer(models.BPE(vocab={text: token_id for token_id, text in enumerate(texts)}, merges=[]))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=_CHAT_TEMPLATE
    )
