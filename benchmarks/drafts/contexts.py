"""Contexts to generate from: recorded conversations, cut where the model speaks."""

import json
import random
from pathlib import Path

from app.text.tokenizer import Tokens
from loadgen.errors import NotAsMeant


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """The `messages` of each line, with `role` and `content`. Raises `NotAsMeant` for another file."""
    try:
        return [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotAsMeant(f"{path} is no file of conversations: {error!r}") from error


def cut_contexts(messages: list[dict[str, str]], tokenizer: Tokens, *, turns: int, tokens: int) -> list[list[int]]:
    """What comes before `turns` messages of the assistant, drawn from those that have at most `tokens` tokens before
    them, the shortest first. Fewer if there are not so many.
    """
    ends = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    contexts = [tokenizer.render_chat(messages[:end]) for end in ends]
    fitting = [context for context in contexts if len(context) <= tokens]
    return sorted(random.Random(0).sample(fitting, min(turns, len(fitting))), key=len)
