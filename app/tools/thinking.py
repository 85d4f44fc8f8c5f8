"""Answers of models that think before they answer, and thoughts that a client keeps, sealed, for a later call."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

from app.machine.files import make_private, make_private_folder, sync
from app.tools.formats import Thinking
from app.tools.reader import AnswerReader, Content, Piece, Reasoning, Speech, undecided


class Opening(Enum):
    """How the prompt leaves the model's turn."""

    FREE = auto()
    """The model may think."""
    OPEN = auto()
    """It is in the middle of its thoughts: the template has begun them."""
    CLOSED = auto()
    """The template has ended them, so that the model does not think."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a call says of thinking, whichever API it came by. Names of fields are for what has no effect."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template, by the caller's own names."""
    effort: str | None = None
    effort_field: str = "reasoning_effort"
    thinks: bool | None = None
    """Whether the model is to think; None: as it does by itself."""
    budget: int | None = None
    """Tokens after which the thoughts end."""
    budget_field: str = "thinking_budget"


@dataclass(frozen=True, slots=True)
class Heeded:
    """What of a `Wish` this model can do. `ignored` are the fields without effect."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    ignored: tuple[str, ...] = ()


SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""
EFFORT = "reasoning_effort"
HARMONY_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class _State(Enum):
    BEFORE = auto()
    """Nothing has come but white space, or only thoughts."""
    THINKING = auto()
    AFTER = auto()


class ThoughtReader:
    """A `ThinkingReader`. Thoughts are what stands between the markers at the start of an answer, and nowhere else: in
    them nothing is a call, and after them a marker is text.

    A model that never ends its thoughts has said nothing.
    """

    def __init__(
        self, form: Thinking, answer: AnswerReader | None, opening: Opening, *, whole_markers: bool = False
    ) -> None:
        """`answer` reads what follows; None: it is content. `whole_markers`: the model writes each marker as one token,
        so that the beginning of one is text, even where the answer is cut.
        """
        self._form = form
        self._whole_markers = whole_markers
        self._answer = answer
        self._is_open = opening is Opening.OPEN
        self._state = _State.BEFORE
        self._text = ""
        """What has not been read."""
        self._taken = 0
        """Bytes of UTF-8 that have been."""
        self._end = 0
        """Those up to the end of the thoughts."""
        self._space: list[str] = []
        """White space where thoughts or the answer may begin."""
        self._thoughts = Speech()
        self._has_thought = False
        self.content_start: int | None = None

    @property
    def is_whole(self) -> bool:
        return self._answer is not None and self._answer.is_whole

    @property
    def is_thinking(self) -> bool:
        return self._state is not _State.AFTER

    @property
    def thought_bytes(self) -> int | None:
        return None if self._state is _State.THINKING else self._end

    def push(self, text: str) -> Iterator[Piece]:
        if self._state is _State.AFTER:
            return self._pass(text)
        self._text += text
        return self._read()

    def _read(self) -> Iterator[Piece]:
        while self.is_thinking:
            if self._state is _State.THINKING:
                place = self._text.find(self._form.end)
                if place < 0:
                    yield from self._think(self._take(len(self._text) - undecided(self._text, self._form.end)))
                    return
                yield from self._think(self._take(place))
                self._take(len(self._form.end))
                self._state, self._end, self._is_open = _State.BEFORE, self._taken, False
                self._thoughts.drop_space()
                if self._has_thought:
                    yield from self._think("\n")
                continue
            text = self._text.lstrip()
            if not self._end:
                self._space.append(self._text[: len(self._text) - len(text)])
            self._take(len(self._text) - len(text))
            if not text or (self._form.open.startswith(text) and text != self._form.open):
                return
            if text.startswith(self._form.open):  # some repeat it where the prompt has it
                self._take(len(self._form.open))
                self._state = _State.THINKING
            elif self._is_open:
                self._state = _State.THINKING
            else:
                self._state = _State.AFTER
                space = "".join(self._space)
                self.content_start = self._taken - len(space.encode())
                yield from self._pass(space + self._text)
            self._space.clear()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if self._state is _State.THINKING or (self._state is _State.BEFORE and self._is_open):
            self._state = _State.THINKING
            if not cut or self._whole_markers:
                yield from self._think(self._take(len(self._text)))
        elif self._state is _State.BEFORE:
            is_marker = not self._whole_markers or self._text.startswith(self._form.begin)  # the beginning, and no text
            if not (cut and self._text and is_marker):
                yield from self._pass("".join([*self._space, self._text]))
        if self._answer is not None:
            yield from self._answer.finish(cut=cut)

    def _think(self, text: str) -> Iterator[Piece]:
        """The next thoughts, without white space around all of them."""
        for said in self._thoughts.say(text if self._has_thought else text.lstrip()):
            self._has_thought = True
            yield Reasoning(said.text)

    def _pass(self, text: str) -> Iterator[Piece]:
        if self._answer is not None:
            return self._answer.push(text)
        return iter([Content(text)] if text else [])

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._taken += len(taken.encode(errors="surrogatepass"))
        return taken


NONCE_BYTES = 16
TAG_BYTES = 32


def kept_secret(folder: Path) -> bytes:
    """The secret of a server's seals, which is in `folder` from its first start on. Raises `OSError`."""
    path = folder / "seal.key"
    make_private_folder(folder)
    if not path.exists():
        fresh = path.with_suffix(".new")  # one that a crash cuts short must not become the secret
        make_private(fresh)
        fresh.write_bytes(secrets.token_bytes(32))
        sync(fresh)
        fresh.rename(path)
    return path.read_bytes()


class Seal:
    """Encrypts with SHAKE-256 as a stream cipher, then authenticates with HMAC-SHA-256."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Servers with one `secret` open what another has sealed. None: it opens its own, until it ends."""
        self._secret = secret or secrets.token_bytes(32)
        self._cipher_key, self._tag_key = (
            hmac.digest(self._secret, purpose, "sha256") for purpose in (b"djinn thoughts", b"djinn thoughts tag")
        )

    def of(self, owner: str | None) -> Self:
        """The seal of one tenant: it opens nothing that another's has closed."""
        return type(self)(hmac.digest(self._secret, (owner or "").encode(), "sha256"))

    def close(self, text: str) -> str:
        """The text, sealed: no two times alike."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        hidden = self._cipher(nonce, text.encode(errors="surrogatepass"))
        return urlsafe_b64encode(nonce + self._tag(nonce + hidden) + hidden).decode()

    def open(self, sealed: object) -> str | None:
        """The text that was sealed, as a client sends it back; None: by another server, or it is not as it was."""
        try:
            data = urlsafe_b64decode(sealed) if isinstance(sealed, str) else b""
        except ValueError:
            return None
        nonce, tag, hidden = data[:NONCE_BYTES], data[NONCE_BYTES:][:TAG_BYTES], data[NONCE_BYTES + TAG_BYTES :]
        if not hmac.compare_digest(tag, self._tag(nonce + hidden)):
            return None
        return self._cipher(nonce, hidden).decode(errors="surrogatepass")

    def _cipher(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._cipher_key + nonce).digest(len(data))
        return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")

    def _tag(self, data: bytes) -> bytes:
        return hmac.digest(self._tag_key, data, "sha256")
