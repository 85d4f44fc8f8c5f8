"""Which number of agents is probed next, and what has been found so far. Pure."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Search:
    """Finds the greatest number from `least` to `most` that holds, if every greater one fails, by doubling and
    bisection. The two numbers at the border are probed until the majority of `rounds` is certain.

    Where noise makes a number fail and a greater one hold, the smaller one counts.
    """

    least: int
    most: int
    rounds: int = 1
    _votes: dict[int, list[bool]] = field(default_factory=dict)

    def add(self, agents: int, held: bool) -> None:
        """A probe of that many agents is over."""
        self._votes.setdefault(agents, []).append(held)

    def round_of(self, agents: int) -> int:
        """How many probes of that many agents are over."""
        return len(self._votes.get(agents, ()))

    @property
    def held(self) -> int | None:
        """The greatest number that holds so far, below any that failed; None if there is none."""
        failed = self.failed
        holding = (agents for agents in self._votes if self._holds(agents) and (failed is None or agents < failed))
        return max(holding, default=None)

    @property
    def failed(self) -> int | None:
        """The smallest number that has failed so far; None if none has."""
        return min((agents for agents in self._votes if not self._holds(agents)), default=None)

    def next(self) -> int | None:
        """How many agents are probed next; None if the border is certain."""
        for agents, votes in self._votes.items():
            if 2 * sum(votes) == len(votes) and not self._is_settled(agents):
                return agents
        low, high = self.held, self.failed
        if low is None and high is None:
            return self.least
        if low is not None and high is None and low < self.most:
            return min(2 * low, self.most)
        if low is not None and high is not None and high - low > 1:
            return (low + high) // 2
        border = (agents for agents in (low, high) if agents is not None)
        return next((agents for agents in border if not self._is_settled(agents)), None)

    def _holds(self, agents: int) -> bool:
        """Whether more probes held than failed, so far."""
        votes = self._votes[agents]
        return 2 * sum(votes) > len(votes)

    def _is_settled(self, agents: int) -> bool:
        """Whether further rounds could not change the majority."""
        votes = self._votes[agents]
        return 2 * sum(votes) > self.rounds or 2 * votes.count(False) >= self.rounds
