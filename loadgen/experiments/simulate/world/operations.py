"""What happens to a cluster: replicas that die, rolling updates, replicas that come, sessions that move."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from simpy import Environment

from loadgen.experiments.simulate.costs import Costs
from loadgen.experiments.simulate.plan import ClusterPlan, Event, Happening, Policy
from loadgen.experiments.simulate.world.front import Front
from loadgen.experiments.simulate.world.replica import Replica
from loadgen.experiments.simulate.world.session import Session
from loadgen.experiments.simulate.world.tally import Tally

if TYPE_CHECKING:
    from simpy import Event as Awaited

Steps = Generator["Awaited", Any, None]


class Operations:
    """Carries out the events of a plan."""

    def __init__(self, env: Environment, plan: ClusterPlan, costs: Costs, front: Front, tally: Tally) -> None:
        self._env, self._plan, self._front, self._tally = env, plan, front, tally
        self._move_s = costs.bytes_per_token / plan.link_bytes_per_s

    def start(self) -> None:
        """Have all events happen in their time."""
        for event in self._plan.events:
            self._env.process(self._happen(event))

    def _happen(self, event: Event) -> Steps:
        yield self._env.timeout(event.at_s)
        replicas = list(self._front.replicas)
        if event.what is Happening.ADD:
            self._front.add(event.count)
        elif event.what is Happening.BALANCE:
            if self._front.policy is Policy.OWNER:
                yield from self._balance(replicas)
        elif event.what in (Happening.REPLICA, Happening.ZONE):
            zones = event.count if event.what is Happening.ZONE else len(replicas)
            yield from self._lose(replicas[::zones])
        else:
            moves = event.what is Happening.ROLLING and self._front.policy is Policy.OWNER
            for first in range(0, len(replicas), event.count):
                some = replicas[first : first + event.count]
                yield self._env.all_of([self._env.process(self._renew(each, moves=moves)) for each in some])

    def _lose(self, replicas: Sequence[Replica]) -> Steps:
        for replica in replicas:
            self._front.lost(replica)
        yield self._env.timeout(self._plan.down_s)
        for replica in replicas:
            self._front.is_back(replica)

    def _renew(self, replica: Replica, *, moves: bool) -> Steps:
        """Let the replica end in peace and start again; with `moves` its sessions go elsewhere before."""
        if not replica.up:
            return
        replica.takes = False
        if moves:
            yield from self._empty(replica)
        replica.closing = True
        for session in list(replica.sessions):
            if session.turn is not None:
                yield session.turn.done
        replica.save()
        self._front.lost(replica)
        yield self._env.timeout(self._plan.down_s)
        self._front.is_back(replica)

    def _empty(self, replica: Replica) -> Steps:
        """Move all sessions away, those with turns after these."""
        while replica.up and replica.sessions:
            rests = [session for session in replica.sessions if session.turn is None]
            if not rests:
                turn = next(iter(replica.sessions)).turn
                assert turn is not None
                yield turn.done
            for session in rests:
                target = self._front.place()
                if target is None:
                    return
                yield from self._move(session, replica, target)

    def _move(self, session: Session, source: Replica, target: Replica) -> Steps:
        """Move a session unless it has a turn again, or one of the two is gone."""
        if session.turn is not None or session not in source.sessions:
            return
        seconds = session.kv * self._move_s
        session.moving_until = self._env.now + seconds
        yield self._env.timeout(seconds)
        if source.up and target.up and session in source.sessions:
            source.forget(session)
            target.arrive(session)
            self._front.directory.moved(session, self._env.now)
            self._tally.moves += 1
            self._tally.moved_tokens += session.kv

    def _balance(self, replicas: Sequence[Replica]) -> Steps:
        """Move what each has above the mean to those below it, all of those that have too many at once."""
        mean = sum(len(each.sessions) for each in replicas) // len(replicas)
        room = [each for each in replicas if each.up for _ in range(mean - len(each.sessions))]
        moving = []
        for donor in replicas:
            count = min(len(donor.sessions) - mean - 1, len(room))
            if donor.up and count > 0:
                targets, room = room[-count:], room[:-count]
                moving.append(self._env.process(self._give(donor, targets)))
        yield self._env.all_of(moving)

    def _give(self, donor: Replica, targets: Sequence[Replica]) -> Steps:
        for session, target in zip(list(donor.sessions), targets, strict=False):
            yield from self._move(session, donor, target)
