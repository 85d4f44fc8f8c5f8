"""Where the agents' words come from: real text, so that tokenizers and caches behave as they do in use."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from pydantic import BaseModel, ValidationError

from loadgen.errors import LoadgenError

SYSTEM_TOPIC = "debugger"
FORM = "each line is one conversation: a JSON object with id, and messages with role and content"


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text that opens every agent's prompt, and documents for the rest."""

    name: str
    system: str
    documents: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Fingerprint: runs are comparable only if it is equal."""
        return hashlib.sha256("\0".join((self.system, *self.documents)).encode()).hexdigest()

    def read_from(self, first: int) -> Iterator[str]:
        """The documents in order from number `first` on, for ever."""
        while True:
            yield self.documents[first % len(self.documents)]
            first += 1


def python_topics() -> Corpus:
    """The help topics of the running Python: some 460,000 characters of English about the language.

    They ship with Python as `pydoc_data.topics`, so a run needs no download. They differ between Python versions, which
    `sha256` shows.
    """
    documents = tuple(text for topic, text in sorted(topics.items()) if topic != SYSTEM_TOPIC)
    return Corpus("pydoc_data.topics", topics[SYSTEM_TOPIC], documents)


class _Message(BaseModel):
    role: str
    content: str


class _Conversation(BaseModel):
    id: str
    messages: list[_Message]


def read_texts(path: Path) -> Corpus:
    """Conversations from a file with one JSON object a line: `id`, and `messages` with `role` and `content`.

    The system messages of the first conversation open every prompt; the other messages of each are one document. Raises
    `LoadgenError` if the file cannot be read or has no conversation, and for a line that is not one.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
    except OSError as error:
        raise LoadgenError(f"cannot read texts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LoadgenError(f"texts {path}: byte {error.start} is not UTF-8") from error
    conversations = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    documents = tuple(text for conversation in conversations if (text := _render(conversation)))
    if not documents:
        raise LoadgenError(f"texts {path}: no conversation with a message in it")
    system = "\n\n".join(m.content for m in conversations[0].messages if m.role == "system")
    return Corpus(path.name, system, documents)


def _parse(path: Path, number: int, line: str) -> _Conversation:
    try:
        return _Conversation.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] == "json_invalid":
            raise LoadgenError(f"texts {path}, line {number}: not a conversation: invalid JSON; {FORM}") from error
        reason = ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))
        raise LoadgenError(f"texts {path}, line {number}: not a conversation: {reason}") from error


def _render(conversation: _Conversation) -> str:
    turns = (message for message in conversation.messages if message.role != "system")
    return "".join(f"{message.role}: {message.content}\n\n" for message in turns)
