"""Real text that every machine has, to cut prompts from."""

from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer


class TokenSource:
    """Deals disjoint slices of `tokens`."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._next = 0

    def take(self, count: int) -> list[int]:
        """The next `count` tokens. Raises ValueError if so many are not left."""
        piece = self._tokens[self._next : self._next + count]
        if len(piece) < count:
            raise ValueError(f"the text has {len(self._tokens)} tokens, too few for this plan")
        self._next += count
        return piece


def read_text_tokens(model: Path) -> list[int]:
    """Python's language reference, which every Python installation carries, in the model's own tokens."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids
