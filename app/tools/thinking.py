"""Answers of models that think before they answer, and thoughts that a client keeps, sealed, for a later call."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

from app.machine.files import make_private, make_private_folder, sync
from app.tools.definitions import Tool
from app.tools.formats import HARMONY, Thinking
from app.tools.reader import (
    AnswerReader,
    CallBegun,
    Content,
    Piece,
    Reasoning,
    Speech,
    ThinkingReader,
    read_calls,
    undecided,
)


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


class ThoughtReader(ThinkingReader):
    """Thoughts are what stands between the markers at the start of an answer, and nowhere else: in them nothing is a
    call, and after them a marker is text.

    A model that never ends its thoughts has said nothing.
    """

    def __init__(
        self, form: Thinking, answer: AnswerReader | None, opening: Opening, *, whole_markers: bool = False
    ) -> None:
        """`answer` reads what follows; None: it is content."""
        super().__init__(whole_markers=whole_markers)
        self._form = form
        self._answer = answer
        self._is_open = opening is Opening.OPEN
        self._state = _State.BEFORE
        self._space: list[str] = []
        """White space where thoughts or the answer may begin."""
        self._thoughts = Speech()
        self._has_thought = False

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
        return self._pass(text) if self._state is _State.AFTER else super().push(text)

    def _read(self, *, last: bool) -> Iterator[Piece]:
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

    def _finish(self, cut: bool) -> Iterator[Piece]:
        if self._state is _State.THINKING or (self._state is _State.BEFORE and self._is_open):
            self._state = _State.THINKING
            if not cut or self._whole_markers:
                yield from self._think(self._take(len(self._text)))
        elif self._state is _State.BEFORE:
            is_marker = not self._whole_markers or self._text.startswith(self._form.begin)  # the beginning, and no text
            if not (cut and self._text and is_marker):
                yield from self._pass("".join([*self._space, self._text]))
        if self._answer is not None:
            yield from self._answer.finish(cut=cut, stop=self._stop)

    def _think(self, text: str) -> Iterator[Piece]:
        """The next thoughts, without white space around all of them."""
        for said in self._thoughts.say(text if self._has_thought else text.lstrip()):
            self._has_thought = True
            yield Reasoning(said.text)

    def _pass(self, text: str) -> Iterator[Piece]:
        if self._answer is not None:
            return self._answer.push(text)
        return iter([Content(text)] if text else [])


MESSAGE = "<|message|>"
BEGINS = ("<|start|>", "<|channel|>")
"""What begins a message."""
ENDS = ("<|end|>", "<|call|>", "<|return|>", *BEGINS)
"""What ends one: the next may begin where a model forgets the end."""
MAX_HEADER = 300
_HEADER = re.compile(r"(<\|start\|>|assistant|<\|channel\|>|<\|constrain\|>|[\w.=\-]|\s)*")
_WORDS = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE)


class HarmonyReader(ThinkingReader):
    """Answers of gpt-oss are messages, each with a channel: `analysis` is thoughts, a message to `functions.NAME` a
    call, and anything else content (https://github.com/openai/harmony/blob/main/docs/format.md).
    """

    def __init__(self, tools: Sequence[Tool], **options: bool) -> None:
        super().__init__(tools, **options)
        self._kind: type[Reasoning | Content | CallBegun] | None = None
        """What the message is; None: its header has not ended."""
        self._name = ""
        self._held: list[str] = []
        """The arguments of the call that has not ended."""
        self._said: set[type] = set()
        self._space = ""

    @property
    def is_thinking(self) -> bool:
        return self._kind in (None, Reasoning) and not self._said - {Reasoning} and not self.calls

    @property
    def thought_bytes(self) -> int | None:
        return None if self._kind is Reasoning else self._end

    def _finish(self, cut: bool) -> Iterator[Piece]:
        yield from self._read(last=not cut or self._whole_markers)
        if self._stop is not None:
            called = read_calls({"name": self._name, "arguments": "".join(self._held)}, self._tools)
            cut = called is None or not any(marker in self._stop for marker in ENDS)
        if self._kind is CallBegun and cut:
            self._is_cut = True
        elif self._kind is CallBegun:
            yield from self._end_message()
        elif self._kind is None and not cut and not self._text.startswith(_WORDS):
            yield from self._say(Content, self._take(len(self._text)))
        if self._kind is Reasoning:
            self._end = self._taken

    def _read(self, *, last: bool) -> Iterator[Piece]:
        while self._text:
            if self._kind is None:
                place = self._text.find(MESSAGE)
                header = self._text if place < 0 else self._text[:place]
                if not self._may_be_header(header):
                    self._take(next((len(each) for each in ENDS if self._text.startswith(each)), 0))
                    self._kind = Content
                elif place < 0:
                    return
                else:
                    self._begin_message(self._take(place))
                    self._take(len(MESSAGE))
                continue
            found = [(self._text.find(marker), marker) for marker in ENDS if marker in self._text]
            if not found:
                waits = 0 if last else max(undecided(self._text, marker) for marker in ENDS)
                yield from self._body(self._take(len(self._text) - waits))
                return
            place, marker = min(found)
            yield from self._body(self._take(place))
            if marker not in BEGINS:
                self._take(len(marker))
            yield from self._end_message()

    def _may_be_header(self, text: str) -> bool:
        taken = _HEADER.match(text)
        rest = text[taken.end() :] if taken else text
        begins = not text.strip() or text.lstrip().startswith(("<|", "assistant", "to="))
        begins = begins or any(word.startswith(text.strip()) for word in ("<|", "assistant", "to="))
        return begins and len(text) <= MAX_HEADER and (not rest or any(word.startswith(rest) for word in _WORDS))

    def _begin_message(self, header: str) -> None:
        to = re.search(r"to=functions\.([\w.\-]+)", header)
        if to is not None and to[1] in self._tools:
            self._kind, self._name, self._held = CallBegun, to[1], []
        elif re.search(r"<\|channel\|>\s*analysis", header):
            self._kind = Reasoning
        else:
            self._kind = Content
        if self._kind in self._said:
            self._space = "\n"

    def _body(self, text: str) -> Iterator[Piece]:
        if self._kind is CallBegun:
            self._held.append(text)
        elif self._kind is Reasoning:
            yield from self._say(Reasoning, text)
        else:
            yield from self._say(Content, text)

    def _say(self, kind: type[Reasoning | Content], text: str) -> Iterator[Piece]:
        if text:
            if kind is Content and self.content_start is None:
                self.content_start = self._taken - len(text.encode(errors="surrogatepass"))
            self._said.add(kind)
            text, self._space = self._space + text, ""
            yield kind(text)

    def _end_message(self) -> Iterator[Piece]:
        if self._kind is Reasoning:
            self._end = self._taken
        if self._kind is CallBegun:
            text = "".join(self._held)
            calls = read_calls({"name": self._name, "arguments": text}, self._tools)
            if calls is None:
                yield from self._say(Content, text)
            for name, arguments in calls or ():
                yield from self._call(HARMONY, name, arguments)
        self._kind = None


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
