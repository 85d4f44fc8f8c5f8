"""What can be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.cluster.pinning import cores_for
from loadgen.experiments.cluster.plan import ClusterPlan, Router


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": (0,)}, "from 1 to 64"),
        ({"replicas": ()}, "from 1 to 64"),
        ({"replicas": (2, 2)}, "names a number twice"),
        ({"routers": ()}, "one or both of owner and hash"),
        ({"routers": (Router.HASH, Router.HASH)}, "once each"),
        ({"moves_per_second": -1.0}, "moves_per_second"),
        ({"kill_every": 0.0}, "kill_every"),
        ({"drain_at": float("inf")}, "drain_at"),
        ({"turn_timeout": 0.0}, "turn_timeout"),
        ({"kills": 3}, "without kill_every"),
        ({"kills": -1}, "kills must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        ClusterPlan(**given)


def test_a_single_replica_has_nowhere_to_move_sessions_to() -> None:
    plan = ClusterPlan(moves_per_second=2.0)
    assert [plan.moves(count, Router.OWNER) for count in (1, 2)] == [False, True]
    assert not ClusterPlan().moves(2, Router.OWNER)


def test_sessions_that_a_hash_must_find_again_are_not_moved() -> None:
    assert not ClusterPlan(moves_per_second=2.0).moves(2, Router.HASH)


def test_replicas_have_cores_of_their_own_only_where_one_is_left_for_the_others() -> None:
    assert cores_for(2, (0, 1, 2)) == (1, 2)
    assert cores_for(2, (0, 1)) == ()
    assert cores_for(1, (4, 5)) == (5,)
