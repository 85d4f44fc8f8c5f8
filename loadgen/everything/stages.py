"""Which experiments there are, and how large each is."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """One experiment: the question that it answers, and its arguments when run at full size and `quick`."""

    experiment: str
    question: str
    full: str
    quick: str
    takes_rivals: bool = False

    def arguments(self, rivals: Sequence[str], *, quick: bool) -> list[str]:
        """Its command line, but for where the results go; `rivals` are further targets, by name."""
        added = [part for rival in rivals for part in ("--target", rival)] if self.takes_rivals else []
        return [self.experiment, *(self.quick if quick else self.full).split(), *added]


POLICIES = "--target djinn --target djinn+lru --target djinn+none"

STAGES = (
    Stage(
        "density",
        "How long do agents wait that come back after a tool call, when their KV does not fit the device?",
        full=f"{POLICIES} --kv 20x1024 --agents 80 --rate 0.2 --context 1024 --turns 6 --think 10:20 --seed 1",
        quick=f"{POLICIES} --kv 4x512 --agents 12 --rate 0.3 --context 448 --turns 3 --think 10:20 --seed 1 "
        "--completion-tokens 24 --resume-tokens 24 --time-scale 0.25",
        takes_rivals=True,
    ),
    Stage(
        "capacity",
        "How many agents does a server hold before those that come back wait too long?",
        full=f"{POLICIES} --kv 20x1024 --least 8 --most 128 --context 1024 --turns 6 --think 10:20 --seed 1",
        quick="--target djinn --target djinn+none --kv 4x512 --least 2 --most 16 --context 448 --turns 3 --think 10:20 "
        "--seed 1 --completion-tokens 24 --resume-tokens 24 --time-scale 0.25",
        takes_rivals=True,
    ),
    Stage(
        "resume-latency",
        "Is it faster to bring a stopped computation back than to do it again, and how near is that to a copy by hand?",
        full="--target djinn",
        quick="--target djinn --quick",
    ),
    Stage(
        "oversubscribe",
        "What becomes of sessions that outgrow the device?",
        full="--target djinn",
        quick="--target djinn --quick",
    ),
    Stage(
        "whitebox",
        "Can a session be stopped between any two layers without a trace, and what do the others notice?",
        full="--target djinn --layers 8,16,24",
        quick="--target djinn --sequences 2 --tokens 16 --others 4 --pause-seconds 2 --repeats 2",
    ),
    Stage(
        "kv",
        "How large is KV, does it pay to compress it, and to take it to another process?",
        full="--target from=djinn --to to=djinn",
        quick="--target from=djinn --to to=djinn --quick",
    ),
    Stage(
        "weights",
        "How fast is a model that is six times larger than the memory for its weights?",
        full="--cold",
        quick="--quick",
    ),
)
