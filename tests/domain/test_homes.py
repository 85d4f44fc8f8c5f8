"""Whatever is lost and whoever dies, a session has never two homes, and in the end it has one."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.domain.homes import MOST_KEPT, Home, Homes, HomeState, Taken
from app.domain.values import SessionId

ONE = SessionId("ses_a_1")
MINE = "mine"
"""What calls name the first session by; and another one, if a server that knows of no such session is called so."""
RESPONSE = "resp_a_1"
"""A response of the first session."""
NAMES = ("a", "b", "c")
Commit = tuple[str, str, int, int]
"""Old home, new home, the token's number, the old home's life."""


@dataclass
class Server:
    """What one server has in memory and in its journal."""

    has_session: bool = False
    """In the journal; memory follows it."""
    has_other: bool = False
    """Whether another session has been opened here under the name."""
    journal: dict[SessionId, Home] = field(default_factory=dict)
    went: list[tuple[str, SessionId]] = field(default_factory=list)
    """Responses that have gone, in the journal."""
    homes: Homes = field(default_factory=Homes)
    coming: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By token: who sends the session, and the epoch."""
    is_up: bool = True
    lives: int = 1

    @property
    def leaving(self) -> bool:
        home = self.homes.of(ONE)
        return home is not None and home.state is HomeState.LEAVING

    @property
    def serves(self) -> bool:
        return self.is_up and self.has_session and not self.leaving

    @property
    def finds(self) -> str:
        """What a call with the name comes to."""
        if self.coming or (self.has_session and self.leaving):
            return "moving"
        if self.has_session or self.has_other:
            return "here"
        return "moved" if self.homes.gone_by_name(None, MINE) else "new"

    def write(self, home: Home) -> None:
        self.journal[ONE] = home


class Protocol(RuleBasedStateMachine):
    """One session and three servers. Requests come late, answers get lost, servers die between any two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.servers = {name: Server() for name in NAMES}
        self.servers["a"].has_session = True
        self.under_way: list[Commit] = []
        self.answers: list[tuple[Commit, Taken]] = []
        self.tokens = 0

    @precondition(lambda self: any(each.serves for each in self.servers.values()))
    @rule(to=st.sampled_from(NAMES))
    def move(self, to: str) -> None:
        """Offered, received, written down, and the commit is sent."""
        old = next(name for name, each in self.servers.items() if each.serves)
        here, there = self.servers[old], self.servers[to]
        absent = not there.has_session and there.homes.epoch(ONE) < here.homes.epoch(ONE) + 1
        if to == old or not there.is_up or not absent or there.coming:
            return
        if there.has_other:  # the name is taken
            return
        self.tokens += 1
        there.coming[self.tokens] = (old, here.homes.epoch(ONE) + 1)
        here.write(here.homes.leave(ONE, None, to, there.homes.seq, MINE))
        self.under_way.append((old, to, self.tokens, here.lives))

    @precondition(lambda self: bool(self.under_way))
    @rule(data=st.data(), answered=st.booleans())
    def take(self, data: st.DataObject, answered: bool) -> None:
        """The commit arrives, perhaps after all else."""
        commit = data.draw(st.sampled_from(self.under_way))
        old, new, token, _ = commit
        self.under_way.remove(commit)
        there = self.servers[new]
        if not there.is_up:
            return
        found, taken = there.coming.pop(token, None), Taken.NO
        if found is not None:
            there.write(there.homes.arrive(ONE, None, old, found[1], MINE))
            there.has_session, taken = True, Taken.YES
        if answered:
            self.answers.append((commit, taken))

    @precondition(lambda self: bool(self.answers))
    @rule(data=st.data())
    def follow(self, data: st.DataObject) -> None:
        """The answer comes back, if the old home still lives to hear it."""
        found = data.draw(st.sampled_from(self.answers))
        self.answers.remove(found)
        (old, _, _, life), taken = found
        here = self.servers[old]
        if here.is_up and here.lives == life and here.leaving:
            self.decide(here, taken)

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        """One whose session is leaving asks after it: it has lost patience, or has started again."""
        here = self.servers[name]
        home = here.homes.of(ONE)
        if not here.is_up or home is None or home.state is not HomeState.LEAVING:
            return
        there = self.servers[home.peer]
        if not there.is_up:
            return
        there.coming = {token: coming for token, coming in there.coming.items() if coming[1] > home.epoch}
        here.lives += 1  # it waits for no answer to the commit any more
        self.decide(here, there.homes.has_taken(ONE, home.epoch, home.peer_seq))

    def decide(self, here: Server, taken: Taken) -> None:
        assert taken is not Taken.FORGOTTEN
        if taken is Taken.YES:
            here.write(here.homes.go(ONE, [RESPONSE]))
            here.went.append((RESPONSE, ONE))
            here.has_session = False
        else:
            here.write(here.homes.stay(ONE))

    @rule(name=st.sampled_from(NAMES))
    def call(self, name: str) -> None:
        """Somebody calls by the name, straight there."""
        here = self.servers[name]
        if here.is_up and here.finds == "new":
            here.has_other = True

    @rule(name=st.sampled_from(NAMES))
    def close_other(self, name: str) -> None:
        self.servers[name].has_other = False

    @rule(name=st.sampled_from(NAMES))
    def kill(self, name: str) -> None:
        here = self.servers[name]
        here.is_up, here.coming = False, {}

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        here = self.servers[name]
        if not here.is_up:
            here.is_up, here.homes, here.lives = True, Homes(here.journal, here.went), here.lives + 1

    @invariant()
    def one_home_at_most(self) -> None:
        assert sum(each.serves for each in self.servers.values()) <= 1
        assert any(each.has_session for each in self.servers.values())

    @invariant()
    def a_name_is_one_sessions(self) -> None:
        for each in self.servers.values():
            assert not (each.has_session and each.has_other)

    @invariant()
    def who_has_let_it_go_says_where(self) -> None:
        for each in self.servers.values():
            home = each.homes.of(ONE)
            has_gone = home is not None and home.state is HomeState.GONE
            assert each.homes.gone_by_name(None, MINE) == (ONE if has_gone else None)
            assert each.homes.gone_by_response(RESPONSE) == (ONE if has_gone else None)
            assert each.homes.gone_by_name("another", MINE) is None

    def teardown(self) -> None:
        """Everybody starts, and asks: then there is one home."""
        for name in NAMES:
            self.start(name)
        for _ in NAMES:
            for name in NAMES:
                self.ask(name)
        assert sum(each.serves for each in self.servers.values()) == 1


TestProtocol = Protocol.TestCase


def test_what_may_have_been_forgotten_is_not_denied() -> None:
    homes = Homes()
    homes.arrive(ONE, None, "b", 1)
    asked_at = homes.seq - 1
    assert homes.has_taken(ONE, 1, asked_at) is Taken.YES
    assert homes.has_taken(ONE, 2, homes.seq) is Taken.NO
    old = Homes({SessionId("another"): Home(HomeState.GONE, 1, asked_at + MOST_KEPT + 1)})
    assert old.has_taken(ONE, 1, asked_at) is Taken.FORGOTTEN
    assert old.has_taken(ONE, 1, asked_at + 1) is Taken.NO


def test_an_arrival_that_was_not_written_down_has_never_been() -> None:
    homes = Homes()
    homes.arrive(ONE, None, "b", 1)
    homes.undo(ONE, None)
    assert homes.has_taken(ONE, 1, 0) is Taken.NO
    before = homes.arrive(ONE, None, "b", 1)
    homes.arrive(ONE, None, "b", 2)
    homes.undo(ONE, before)
    assert homes.has_taken(ONE, 2, homes.seq) is Taken.NO
    assert homes.has_taken(ONE, 1, homes.seq) is Taken.YES
