"""How few tokens a text can have, told from its length: a text that cannot fit need not be tokenized."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from app.domain.errors import ContextTooLong, FieldOutOfRange
from app.model_store.byte_tokenizer import byte_alphabet

_NFC_SHRINKS = 4
"""More characters than Unicode's composition (NFC) makes one of: in Unicode 16 it is three."""


@dataclass(frozen=True, slots=True)
class TextLimit:
    """The text of a request's `field` has room in a context of so many tokens, of which some are `used`."""

    field: str
    context: int
    used: int = 0


@dataclass(frozen=True, slots=True)
class CharacterLimit:
    """The text of a request's `field` may have so many characters, however many tokens they are."""

    field: str
    most: int


class TokenLengths:
    """Characters, or bytes of UTF-8, that a token stands for at most."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        shrinks = _normalizer_shrinks(_state(tokenizer.normalizer))
        strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        unspelled = _unspelled(tokenizer)
        keeps = unspelled is not None and _keeps_all(_state(tokenizer.pre_tokenizer)) and not strips
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._longest = longest * shrinks if keeps and shrinks is not None else None
        """None: a token may stand for any number of characters."""
        self._unspelled = unspelled or b""

    def check(self, text: str, limit: TextLimit | CharacterLimit) -> None:
        """Raise ContextTooLong if the text's length alone tells that it has too many tokens, FieldOutOfRange if it has
        too many characters.
        """
        if isinstance(limit, CharacterLimit):
            if len(text) > limit.most:
                raise FieldOutOfRange(
                    f"{limit.field} has {len(text)} characters of text: at most {limit.most} are tokenized in one call",
                    param=limit.field,
                )
            return
        fewest = 0 if self._longest is None else -(-self._count(text) // self._longest)
        room = limit.context - limit.used
        if fewest > room:
            raise ContextTooLong(
                f"{limit.field} is too long: its {len(text)} characters are at least {fewest} tokens, and this model's "
                f"context of {limit.context} tokens has room for {room}",
                param=limit.field,
            )

    def _count(self, text: str) -> int:
        """What of the text has tokens: its characters, or its bytes if some of those have none."""
        if not self._unspelled:
            return len(text)
        return len(text.encode(errors="surrogatepass").translate(None, self._unspelled))


def _state(part: Any) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return found


def _unspelled(tokenizer: Tokenizer) -> bytes | None:
    """The bytes that have no token, and so may stand in a text any number of times. None if that is not known of
    characters: unknown ones may become one token together, or none.
    """
    model, vocabulary = tokenizer.model, tokenizer.get_vocab()
    if not isinstance(model, BPE):
        return None
    if model.byte_fallback:
        return b"" if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None
    if not _spells_bytes(_state(tokenizer.pre_tokenizer)):
        return None
    return bytes(byte for byte, character in enumerate(byte_alphabet()) if character not in vocabulary)


def _spells_bytes(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer makes characters of a text's bytes."""
    match pre_tokenizer:
        case {"type": "ByteLevel"}:
            return True
        case {"type": "Sequence", "pretokenizers": parts}:
            return any(map(_spells_bytes, parts))
        case _:
            return False


def _normalizer_shrinks(normalizer: Mapping[str, Any] | None) -> int | None:
    """Of how many characters a normalizer makes one; None if that is not known."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if len(content) >= len(pattern):
            return 1
        case {"type": "NFC"}:
            return _NFC_SHRINKS
        case {"type": "Sequence", "normalizers": parts}:
            found = [_normalizer_shrinks(part) for part in parts]
            return None if None in found else max((shrinks or 1 for shrinks in found), default=1)
        case _:
            return None


def _keeps_all(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer is known to leave no character out."""
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Sequence", "pretokenizers": parts}:
            return all(map(_keeps_all, parts))
        case _:
            return False
