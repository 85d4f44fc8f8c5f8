"""`python -m benchmarks.schema_suite FOLDER`: the JSON Schema Test Suite, draft 2020-12.

First every case is compiled, and its instances are followed: those that are valid must match, the others must not. Then
the model answers under schemas that compile, drawn at random, first alone and then 16 at once. `jsonschema` validates
every answer that came to its end.

The suite is https://github.com/json-schema-org/JSON-Schema-Test-Suite, also in the folder `json` of jsonschema's source
distribution.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from app.domain.errors import FieldOutOfRange
from app.domain.values import FinishReason, Grammar, GrammarKind, SamplingParams
from app.grammars.compiler import Grammars
from app.messages import TurnFinished
from app.model_store.resolve import load_tokenizer
from app.model_store.saved import ModelTokenizer
from benchmarks.engine.live import LiveEngine, LiveTurn
from benchmarks.engine.loading import find_model
from benchmarks.grammars import make_engine
from loadgen.processes.launch import default_model

ANSWERS = 200
WIDTHS = (1, 16)
MAX_TOKENS = 256
PROMPT = "An example of a JSON document:"


@dataclass(frozen=True, slots=True)
class Case:
    """One schema of the suite, and its instances."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]

    @property
    def grammar(self) -> Grammar:
        """The grammar that holds a turn to the schema."""
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(self.schema), "schema")


def read_cases(suite: Path) -> Iterator[Case]:
    """Each case of draft 2020-12."""
    for path in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        for case in json.loads(path.read_text()):
            yield Case(f"{path.stem}: {case['description']}", case["schema"], case["tests"])


def judge(cases: list[Case], grammars: Grammars, tokenizer: ModelTokenizer) -> tuple[list[Case], int]:
    """The cases that compile, and the number of instances that match although they are invalid.

    Prints how many compile, and how many of their instances are judged rightly.
    """
    counts: Counter[str] = Counter()
    compiled = []
    slowest = 0.0
    for case in cases:
        began = time.perf_counter()
        try:
            grammars.compile(case.grammar).result()
        except FieldOutOfRange:
            counts["refused"] += 1
            continue
        finally:
            slowest = max(slowest, time.perf_counter() - began)
        counts["compiled"] += 1
        compiled.append(case)
        counts.update(_verdict(case, test, grammars, tokenizer) for test in case.tests)
    print(dict(counts), f"slowest {slowest * 1e3:.0f} ms")
    return compiled, counts["too lax"]


def _verdict(case: Case, test: dict[str, Any], grammars: Grammars, tokenizer: ModelTokenizer) -> str:
    text = json.dumps(test["data"], ensure_ascii=False)
    end = tokenizer.eos_token_id
    tokens = [*tokenizer.backend.encode(text, add_special_tokens=False).ids, *([] if end is None else [end])]
    accepted = grammars.match(case.grammar).consume(tokens)
    if accepted == test["valid"]:
        return "right"
    print("too strict:" if test["valid"] else "TOO LAX:", f"{case.name}: {test['description']}")
    return "too strict" if test["valid"] else "too lax"


def answer(cases: list[Case], live: LiveEngine, tokenizer: ModelTokenizer, width: int) -> int:
    """Have `ANSWERS` answers written, `width` at once, and validate them; returns how many are invalid."""
    chance = random.Random(0)
    drawn = chance.choices(cases, k=ANSWERS)
    prompt = tokenizer.backend.encode(PROMPT).ids
    counts: Counter[str] = Counter()
    for first in range(0, ANSWERS, width):
        group = drawn[first : first + width]
        sessions = [live.open() for _ in group]
        turns = [
            live.submit(session, prompt, MAX_TOKENS, SamplingParams(first + row, 1.0, grammar=case.grammar))
            for row, (session, case) in enumerate(zip(sessions, group, strict=True))
        ]
        live.finish(*turns)
        live.close(*sessions)
        counts.update(_check(case, turn, tokenizer) for case, turn in zip(group, turns, strict=True))
    print(f"{width} at once:", dict(counts))
    return counts["INVALID"]


def _check(case: Case, turn: LiveTurn, tokenizer: ModelTokenizer) -> str:
    assert isinstance(turn.end, TurnFinished)
    if turn.end.reason is FinishReason.LENGTH:
        return "cut at the last token"
    text = tokenizer.backend.decode(turn.token_ids, skip_special_tokens=True)
    validator: Validator = jsonschema.Draft202012Validator(case.schema)
    try:
        validator.validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"INVALID: {case.name}: {text!r}: {error}")
        return "INVALID"
    return "valid"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.schema_suite", description=__doc__)
    parser.add_argument("suite", type=Path, help="the JSON Schema Test Suite's folder")
    parser.add_argument("--model", type=Path, default=default_model().expanduser(), help="a Transformers folder")
    options = parser.parse_args()
    engine = make_engine(options.model)
    tokenizer = load_tokenizer(find_model(str(options.model)))
    cases, too_lax = judge(list(read_cases(options.suite)), engine.grammars, tokenizer)
    with LiveEngine(engine) as live:
        invalid = sum([answer(cases, live, tokenizer, width) for width in WIDTHS])
    return 1 if invalid or too_lax else 0


if __name__ == "__main__":
    sys.exit(main())
