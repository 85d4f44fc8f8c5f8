"""Between text and tokens: encoding, the chat template, and decoding what is whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import BPE

from app.domain.errors import ContextTooLong, FieldOutOfRange, MalformedRequest
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel, eos_token_ids, load_tokenizer
from app.model_store.saved import ModelTokenizer
from app.model_store.shapes import byte_alphabet
from app.text.chat_template import ChatTemplate

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
                prompt=limit.used + fewest,
                context=limit.context,
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


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Tokens:
    """One model's tokenizer. Nothing here changes after loading, so any thread may call it.

    Encoding takes about a microsecond per character; a long text goes to `asyncio.to_thread`.
    """

    def __init__(self, tokenizer: ModelTokenizer, eos_token_ids: frozenset[int]) -> None:
        self._backend = tokenizer.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._lengths = TokenLengths(self._backend)
        self._known_bytes: dict[int, bytes] = {}
        self._byte_level = self._decodes(["a", "Ġb"], "a b")
        if not self._byte_level and not self._decodes(["a", "▁b"], "a b"):
            raise BrokenModel("the tokenizer is neither byte-level nor of the SentencePiece kind")
        self.drops_first_space = self._decodes(["▁a"], "a")
        self.eos_token_ids = eos_token_ids
        self.bos_token_id = tokenizer.bos_token_id
        self.vocab_size: int = self._backend.get_vocab_size()
        plain, self.chat_template = _template_sources(tokenizer.chat_template)
        """Source of the model's chat template, of several that for tools; None: it has none."""
        self._plain = None if plain is None else ChatTemplate(plain, tokenizer.special_tokens)
        self._for_tools = (
            None if self.chat_template is None else ChatTemplate(self.chat_template, tokenizer.special_tokens)
        )
        self.response_template = tokenizer.response_template

    def encode(
        self, text: str, *, add_special_tokens: bool, limit: TextLimit | CharacterLimit | None = None
    ) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts around it what the model expects (often a BOS).

        Raises MalformedRequest if `text` has a lone surrogate, ContextTooLong or FieldOutOfRange if its length alone
        tells that it is over the limit. One that is not refused may be so too.
        """
        if limit is not None:
            self._lengths.check(text, limit)
        if not text.isascii():
            _require_unicode(text)
        # Unlike `encode`, this lets other Python threads run.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, limit: TextLimit | CharacterLimit | None = None
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to the assistant's turn. Raises what
        `chat_text` and `encode` raise.
        """
        return self.encode(self.chat_text(messages), add_special_tokens=False, limit=limit)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Text of a conversation in the model's own chat template, special tokens included.

        The template may leave out the `tools`. `add_generation_prompt` opens the assistant's turn;
        `continue_final_message` leaves the last message open instead. `variables` are further ones that the template
        reads. Raises MalformedRequest if there is no template or the template rejects the messages.
        """
        template = self._for_tools if tools else self._plain
        if template is None:
            raise MalformedRequest("this model has no chat template; send a prompt instead", param="messages")
        if not messages:
            raise MalformedRequest("messages must hold at least one message", param="messages")
        try:
            return template.render(
                messages,
                tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise MalformedRequest(f"the model's chat template: {error}", param="messages") from error

    @cached_property
    def template_reads(self) -> frozenset[str]:
        """The names of further variables that the chat templates read."""
        try:
            return frozenset().union(*(each.reads for each in (self._plain, self._for_tools) if each is not None))
        except TemplateError:
            return frozenset()

    def added_id(self, text: str) -> int | None:
        """The token that always stands for `text`, special or not; None if there is none."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character; b"" outside the vocabulary."""
        known = self._known_bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            known = self._known_bytes[token_id] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            known = all(character in _BYTE_OF for character in token)
            return bytes(_BYTE_OF[character] for character in token) if known else token.encode()
        if byte := _BYTE_FALLBACK.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def text_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text: `token_bytes`, but nothing for a special token."""
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD in place of partial characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _decodes(self, tokens: list[str], text: str) -> bool:
        """Whether the tokenizer's decoder makes `text` of `tokens`."""
        decoder = self._backend.decoder
        return decoder is not None and decoder.decode(tokens) == text


def _template_sources(templates: str | Mapping[str, str] | None) -> tuple[str | None, str | None]:
    """The template for chats without tools and that for chats with some, as Transformers chooses them."""
    if templates is None or isinstance(templates, str):
        return templates, templates
    plain = templates.get("default")
    return plain, templates.get("tool_use", plain)


def load_tokens(model: ResolvedModel) -> Tokens:
    """The tokenizer of `model`. Raises BrokenModel if its folder has none that can be read and decoded."""
    tokenizer = load_tokenizer(model)
    return Tokens(tokenizer, eos_token_ids(model, tokenizer))


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MalformedRequest(f"character {error.start} of the text is half of a surrogate pair") from error
