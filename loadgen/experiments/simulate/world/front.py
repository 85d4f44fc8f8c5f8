"""The front door: sends each turn to a replica, and has those wait whose replica is away."""

from __future__ import annotations

import math

from simpy import Environment

from loadgen.experiments.simulate.costs import Costs, StepTimes
from loadgen.experiments.simulate.plan import ClusterPlan, Policy
from loadgen.experiments.simulate.world.directory import Directory, Names
from loadgen.experiments.simulate.world.replica import Replica
from loadgen.experiments.simulate.world.routing import ByRoom, routing
from loadgen.experiments.simulate.world.session import Session, Turn
from loadgen.experiments.simulate.world.tally import Tally


class Front:
    """All replicas, and the way to them."""

    def __init__(self, env: Environment, plan: ClusterPlan, policy: Policy, costs: Costs, tally: Tally) -> None:
        self.replicas: list[Replica] = []
        self._env, self._plan, self._costs, self._tally = env, plan, costs, tally
        self._steps = StepTimes(costs, plan.rows, plan.step_tokens)
        self.policy = policy
        self._routing = routing(policy, ())
        self._refused: list[Turn] = []
        """While no replica takes them."""
        self.directory = Directory(tally.finds, tally.puts)
        self._names = Names(tally.named_finds, tally.named_puts)
        self.add(plan.replicas)

    def add(self, count: int) -> None:
        """More replicas."""
        for _ in range(count):
            replica = Replica(self._env, len(self.replicas), self._plan, self._costs, self._steps, self._tally)
            self.replicas.append(replica)
            self._routing.add(replica)

    def place(self) -> Replica | None:
        """Where a session goes that has to go somewhere. Only under `owner`."""
        assert isinstance(self._routing, ByRoom)
        return self._routing.place(self._env.now)

    def submit(self, turn: Turn) -> None:
        """Send a turn on, or have it tried again."""
        session, now = turn.session, self._env.now
        if session.moving_until > now:
            self._tally.away += 1
            self._again(turn, session.moving_until)
            return
        replica = self._routing.choose(session, now)
        if replica is None or not replica.up or replica.closing:
            self._tally.refused += 1
            (self._refused if replica is None else replica.refused).append(turn)
            return
        self._names.use(session, now, is_new=session.place is None)
        if session.place != replica.number:
            self._settle(session, replica)
        if self.policy is Policy.OWNER and session.home is not None and session.home != replica.number:
            self._tally.redirects += self.directory.follow(session, self.replicas[session.home], now)
        replica.submit(turn)

    def place_of(self, session: Session) -> Replica:
        """Where a session is that has had a turn."""
        assert session.place is not None
        return self.replicas[session.place]

    def lost(self, replica: Replica) -> None:
        """A replica is killed. Its turns are sent again once their clients have heard of it."""
        turns = replica.die()
        self._tally.interrupted += len(turns)
        for turn in turns:
            self._after(turn, self._plan.retry_s)

    def is_back(self, replica: Replica) -> None:
        """A replica is up again: who was refused tries again at the time when he would anyway."""
        replica.come_back()
        waiting = [*replica.refused, *self._refused]
        replica.refused, self._refused = [], []
        for turn in waiting:
            self._again(turn, self._env.now)

    def _settle(self, session: Session, replica: Replica) -> None:
        """The session's turns go to this replica from now on; KV that it has elsewhere is of no use any more."""
        if session.place is not None:
            self.replicas[session.place].forget(session)
            session.lose_kv()
        session.place = replica.number
        session.home = replica.number if session.home is None else session.home
        replica.sessions[session] = None

    def _again(self, turn: Turn, from_s: float) -> None:
        """Try a turn again, at the first of its times that is not before."""
        waited = max(from_s, self._env.now) - turn.sent_s
        tries = max(1, math.ceil(waited / self._plan.retry_s))
        self._after(turn, turn.sent_s + tries * self._plan.retry_s - self._env.now)

    def _after(self, turn: Turn, seconds: float) -> None:
        timeout = self._env.timeout(max(0.0, seconds))
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _: self.submit(turn))
