"""What grammars cost: decode steps of sessions with and without one, and schemas that are compiled and followed.

`python -m benchmarks.grammars` decodes with both kinds in turns, in one engine, and prints the ratio. Then it compiles
the schemas of the JSON Schema Test Suite in the folder `--suite`, and follows those instances that are valid.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.domain.grammar import Grammar, GrammarKind
from app.domain.values import SamplingParams
from app.gpu.startup.loader import load_engine
from app.grammars.compiler import Grammars
from app.model_store.tokenizer import load_tokenizer
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import find_model, make_settings
from loadgen.processes.folders import default_model

ROWS = 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer"},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "member"],
    "additionalProperties": False,
}
PEOPLE = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": PERSON, "minItems": 500}), "schema")
PROMPT = "A list of people as JSON:"


def step_ms(live: LiveEngine, prompt: list[int], grammar: Grammar | None, steps: int) -> float:
    """Median time between two tokens while `ROWS` sessions decode."""
    sessions = [live.open() for _ in range(ROWS)]
    turns = [
        live.submit(session, prompt, steps, SamplingParams(seed=row, temperature=0.8, grammar=grammar))
        for row, session in enumerate(sessions)
    ]
    live.finish(*turns)
    live.close(*sessions)
    times = [turn.times for turn in turns]
    begin = max(each[1] for each in times)
    gaps = [b - a for each in times for a, b in itertools.pairwise(each) if a >= begin]
    return statistics.median(gaps) * 1e3


def compare_steps(model: Path, rounds: int, steps: int) -> None:
    """Print the median step of each kind, and the median of the ratios of neighbours."""
    settings = make_settings("cpu", str(model), max_running=ROWS, max_model_len=1024)
    engine = load_engine(find_model(str(model)), settings.engine())
    engine.grammars.compile(PEOPLE).result()
    prompt = load_tokenizer(find_model(str(model))).encode(PROMPT)
    plain, constrained = [], []
    with LiveEngine(engine) as live:
        step_ms(live, prompt, PEOPLE, 8)
        for _ in range(rounds):
            plain.append(step_ms(live, prompt, None, steps))
            constrained.append(step_ms(live, prompt, PEOPLE, steps))
    ratios = [b / a for a, b in zip(plain, constrained, strict=True)]
    print(f"{ROWS} rows: {statistics.median(plain):.1f} ms without, {statistics.median(constrained):.1f} ms with")
    print(f"ratio: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def cases(suite: Path) -> Iterator[tuple[str, object, list[dict[str, object]]]]:
    """Name, schema and tests of each case of draft 2020-12."""
    for path in sorted((suite / "tests" / "draft2020-12").glob("*.json")):
        for case in json.loads(path.read_text()):
            yield f"{path.stem}: {case['description']}", case["schema"], case["tests"]


def run_suite(suite: Path, model: Path) -> None:
    """Print how many cases compile, and how many instances of those are judged rightly."""
    resolved = find_model(str(model))
    grammars, tokenizer = Grammars(resolved, resolved.config.vocab_size), load_tokenizer(resolved)
    counts: Counter[str] = Counter()
    slowest = 0.0
    for name, schema, tests in cases(suite):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "schema")
        began = time.perf_counter()
        try:
            grammars.compile(grammar).result()
        except FieldOutOfRange:
            counts["refused"] += 1
            continue
        finally:
            slowest = max(slowest, time.perf_counter() - began)
        counts["compiled"] += 1
        for test in tests:
            text = json.dumps(test["data"], ensure_ascii=False)
            tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            accepted = grammars.match(grammar).consume(tokens)
            verdict = "right" if accepted == test["valid"] else "too strict" if test["valid"] else "TOO LAX"
            counts[verdict] += 1
            if verdict == "TOO LAX":
                print(f"too lax: {name}: {test['description']}")
    grammars.close()
    print(dict(counts), f"slowest {slowest * 1e3:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=default_model().expanduser(), help="a Transformers folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--suite", type=Path, help="the JSON Schema Test Suite's folder")
    options = parser.parse_args()
    if options.suite is not None:
        run_suite(options.suite, options.model)
    compare_steps(options.model, options.rounds, options.steps)


if __name__ == "__main__":
    main()
