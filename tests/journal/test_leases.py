"""Whatever is frozen, lost or late, and however far clocks go apart within their bound: one holder at most."""

import math
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.journal.lease import NOBODYS, PATIENCE, Lease, Tenure, Watch

LENGTH_S = 10.0
NAMES = ("a", "b", "c")
RATES = (1.0, 1.03, PATIENCE)
"""Of their clocks: seconds that each counts in one."""


@dataclass
class Process:
    """One server. What it does takes several steps, and it may be frozen between any two."""

    rate: float
    offset: float
    watch: Watch = field(default_factory=Watch)
    seen: Lease | None = None
    """What it has read, and not judged yet."""
    taking: tuple[Lease, float] | None = None
    """What it is about to replace, and since when."""
    renewing: float | None = None
    """Since when."""
    tenure: Tenure | None = None

    def forget(self) -> None:
        """It has died."""
        self.watch, self.seen, self.taking, self.renewing, self.tenure = Watch(), None, None, None, None


class Folder(RuleBasedStateMachine):
    """One folder and three servers on three machines."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lease = NOBODYS
        self.words = 0
        numbered = enumerate(zip(NAMES, RATES, strict=True))
        self.processes = {name: Process(rate, 1000.0 * number) for number, (name, rate) in numbered}

    def clock(self, process: Process) -> float:
        return process.offset + process.rate * self.now

    @rule(seconds=st.floats(0, 1.5 * LENGTH_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES))
    def look(self, name: str) -> None:
        self.processes[name].seen = self.lease

    @rule(name=st.sampled_from(NAMES))
    def judge(self, name: str) -> None:
        here = self.processes[name]
        if here.seen is None or here.tenure is not None:
            return
        left_s = 0.0 if here.seen.is_free else here.watch.left_s(here.seen, self.clock(here))
        if not left_s:
            here.taking = here.seen, self.clock(here)

    @rule(name=st.sampled_from(NAMES), arrives=st.booleans(), answered=st.booleans())
    def take(self, name: str, arrives: bool, answered: bool) -> None:
        here = self.processes[name]
        if here.taking is None:
            return
        (seen, began), here.taking = here.taking, None
        self.words += 1
        taken = seen.next(str(self.words), name, LENGTH_S)
        if arrives and self.lease == seen:
            self.lease = taken
            if answered:
                here.tenure = Tenure(taken, began)

    @rule(name=st.sampled_from(NAMES))
    def begin_to_renew(self, name: str) -> None:
        here = self.processes[name]
        if here.tenure is not None and not here.tenure.is_lost:
            here.renewing = self.clock(here)

    @rule(name=st.sampled_from(NAMES), arrives=st.booleans(), answered=st.booleans(), has_room=st.booleans())
    def renew(self, name: str, arrives: bool, answered: bool, has_room: bool) -> None:
        here = self.processes[name]
        if here.renewing is None or here.tenure is None:
            return
        began, here.renewing = here.renewing, None
        if not arrives:
            return
        if not self.lease.is_of(here.tenure.lease):
            if answered:
                here.tenure.lose()
            return
        self.words += 1
        self.lease = self.lease.renewed() if has_room else replace(self.lease, news=str(self.words))
        if answered:
            here.tenure.renewed(self.lease, began)

    @rule(name=st.sampled_from(NAMES), arrives=st.booleans())
    def release(self, name: str, arrives: bool) -> None:
        here = self.processes[name]
        if here.tenure is None:
            return
        if arrives and self.lease.is_of(here.tenure.lease):
            self.lease = self.lease.released()
        here.forget()

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        self.processes[name].forget()

    @precondition(lambda self: self.lease.epoch)
    @invariant()
    def one_holder_at_most(self) -> None:
        holders = [each for each in self.processes.values() if each.tenure is not None]
        held = [each.tenure for each in holders if each.tenure and self.clock(each) < each.tenure.ends_at]
        assert len(held) <= 1
        assert all(tenure.lease.is_of(self.lease) for tenure in held)

    def teardown(self) -> None:
        """All are killed; then whoever looks again and again has the folder in the end."""
        for each in self.processes.values():
            each.forget()
        for _ in range(3):
            self.look("a")
            self.judge("a")
            self.take("a", arrives=True, answered=True)
            self.now += PATIENCE * LENGTH_S
        tenure = self.processes["a"].tenure
        assert tenure is not None
        assert tenure.lease == self.lease


TestFolder = Folder.TestCase


def test_who_has_lost_the_folder_never_has_it_again() -> None:
    tenure = Tenure(NOBODYS.next("word", "", LENGTH_S), began=0.0)
    tenure.lose()
    tenure.renewed(tenure.lease.renewed(), began=1.0)
    assert tenure.is_lost
    assert tenure.ends_at == -math.inf
