"""Real text that every machine has, to cut prompts from."""

from pathlib import Path

from tokenizers import Tokenizer

from loadgen.load.corpus import python_topics


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
    """Python's help topics in the model's own tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("\n".join(python_topics().documents), add_special_tokens=False).ids
    return ids
