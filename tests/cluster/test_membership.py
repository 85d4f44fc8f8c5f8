"""Replicas that know each other through a store: both stores must do the same, whoever comes, goes or is cut off."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from msgspec.structs import replace

from app.cluster import claims, membership
from app.cluster.claims import Load, Member, Record, claim, declare_dead, open_store
from app.cluster.cluster import Cluster
from app.cluster.key import ClusterKey
from app.cluster.membership import Membership
from app.cluster.store import Store
from app.domain.errors import Fenced, FieldOutOfRange, WrongState
from tests.waiting import until

JOURNAL = "11111111"
KEY, OTHER_KEY = ClusterKey(b"one key of a cluster"), ClusterKey(b"another one")
FIRST = Record(journal=JOURNAL, start=1, attempt="first", file=7)
Another = Callable[[], Store]


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LEASE_S": 2.0, "FENCE_S": 2.0, "SAY_S": 0.2, "LOOK_S": 0.05}.items():
        monkeypatch.setattr(membership, name, seconds)
    monkeypatch.setattr(claims, "PATIENCE_S", 3.0)


@pytest.fixture(params=["folder", "etcd"])
async def another(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Another]:
    """Opens the store as one more replica does."""
    opened = list[Store]()
    is_etcd = request.param == "etcd"
    text = f"{request.getfixturevalue('etcd').url}/{tmp_path.name}" if is_etcd else f"folder:{tmp_path / 'store'}"

    def open_one() -> Store:
        opened.append(open_store(text))
        return opened[-1]

    yield open_one
    for each in opened:
        await each.aclose()


def me(name: str, record: Record = FIRST) -> Member:
    return Member(name=name, url=f"http://{name}", journal=record.journal, place="here 7")


@asynccontextmanager
async def joined(store: Store, name: str, record: Record = FIRST) -> AsyncIterator[Membership]:
    await claim(store, name, record, "here 7", KEY)
    async with Membership(store, me(name, record), record, KEY) as found:
        yield found


def freeze(one: Membership) -> None:
    """The process stops: it renews nothing, and takes nothing back."""
    for task in one._tasks:
        task.cancel()


async def refused(store: Store, record: Record, place: str = "there 9") -> str:
    with pytest.raises(FieldOutOfRange) as error:
        await claim(store, "a", record, place, KEY)
    return error.value.message


async def test_replicas_see_each_other_come_speak_and_go(another: Another) -> None:
    async with joined(another(), "a") as a:
        assert set(a.members) == {"a"}
        async with joined(another(), "b") as b:
            await until(lambda: set(a.members) == set(b.members) == {"a", "b"})
            b.say(ready=True, left=False, load=Load(0.5, 3))
            await until(lambda: a.members["b"].ready)
            await until(lambda: a.members["b"].load == Load(0.5, 3))
            with pytest.raises(WrongState, match="has the journal 11111111, and lives"):
                await b.bury(JOURNAL, "a")
        await until(lambda: set(a.members) == {"a"})
        assert a.known == {"a", "b"}
        await b.end(2)
        await until(lambda: a.known == {"a", "b"})  # it has sessions, for its next start
        async with joined(another(), "c") as c:
            c.say(ready=False, left=True, load=None)
            await until(lambda: "c" in a.members and a.members["c"].left)
        await c.end(2)
        await until(lambda: a.known == {"a", "b"})  # `c` has left with all its sessions


async def test_one_that_says_nothing_goes_and_knows_it_when_it_wakes(another: Another) -> None:
    async with joined(another(), "a") as a, joined(another(), "b") as b:
        await until(lambda: "b" in a.members)
        freeze(b)
        await until(lambda: set(a.members) == {"a"})
        with pytest.raises(Fenced, match="slept for too long"):
            b.require()
        async with b:  # it wakes
            b.require()
            await until(lambda: "b" in a.members)


async def test_whatever_fails_in_a_look_at_oneself_one_goes_on_telling(caplog: pytest.LogCaptureFixture) -> None:
    one: Any = Mock()
    one._registry.memory = AsyncMock(side_effect=TimeoutError)  # expected: the last load holds
    looks = chain([RuntimeError("damaged")], repeat(None))
    telling = asyncio.create_task(Cluster._tell(one, Mock(side_effect=looks)))
    await until(lambda: one.membership.say.call_count > 1)
    telling.cancel()
    assert [each.kwargs["ready"] for each in one.membership.say.call_args_list[:2]] == [False, True]
    assert "could not look how it is" in caplog.text


async def test_of_many_who_bind_a_name_one_wins(another: Another) -> None:
    order, replicas = random.Random(5), ("a", "b", "c")
    async with AsyncExitStack() as ends:
        all_of_them = {name: await ends.enter_async_context(joined(another(), name)) for name in replicas}
        for name in map(str, range(20)):
            callers = order.sample(replicas, 3)
            won = await asyncio.gather(*(all_of_them[each].swap(name, None, each) for each in callers))
            assert len(set(won)) == 1
            assert await all_of_them["a"].find(name) == won[0]
        store = another()
        places = await store.read_all("place/")
        assert list(places) == sorted(places)
        assert list(await store.read_all("place/", "place/1", 3)) == ["place/10", "place/11", "place/12"]
        assert await store.read("place/1") == places["place/1"]
        a, b = all_of_them["a"], all_of_them["b"]
        await a.put("name", "a")
        swapped = await asyncio.gather(*(each.swap("name", "a", each.name) for each in (b, all_of_them["c"])))
        assert len(set(swapped)) == 1
        assert await a.swap("name", "a", "a") == swapped[0]
        assert await a.find("name") == swapped[0]
        assert await a.swap("other", "gone", "a") == "a"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"journal": "2222"}, "a has another journal .* is its volume mounted.*djinn cluster forget a --cluster "),
        ({"start": 5}, "an older copy"),
        ({"start": 6, "moves": 2}, "an older copy"),
        ({"start": 6, "file": 8}, "a copy .* has not ended in order.*djinn cluster ended a"),
    ],
)
async def test_a_folder_that_is_empty_old_or_a_copy_is_refused(
    another: Another, changed: dict[str, object], why: str
) -> None:
    store, last = another(), replace(FIRST, start=5, moves=3)
    await claim(store, "a", last, "here 7", KEY)
    new = {"start": 6, "moves": 3, "attempt": "second", **changed}
    with pytest.raises(FieldOutOfRange, match=why):
        await claim(store, "a", replace(FIRST, **new), "there 9", KEY)
    await claim(store, "a", last, "here 7", KEY)  # one whose answer was lost
    await claim(store, "a", replace(last, start=6, attempt="third"), "elsewhere", KEY)  # the disk is on another machine


async def test_a_copy_goes_on_after_an_orderly_end_or_an_operators_word(another: Another) -> None:
    store, copy = another(), replace(FIRST, start=3, attempt="second", file=8)
    async with joined(another(), "a") as a:
        pass
    await a.end(2)
    assert "older copy" in await refused(store, replace(copy, start=2))  # made before that end
    await claim(store, "a", copy, "there 9", KEY)
    later = replace(copy, start=4, attempt="third", file=9)
    assert "not ended in order" in await refused(store, later)
    await declare_dead(store, "a", is_lost=False)
    await claim(store, "a", later, "there 9", KEY)


async def test_a_living_replica_is_not_replaced_but_by_its_own_restart(another: Another) -> None:
    store, second = another(), replace(FIRST, start=2, attempt="second")
    async with joined(another(), "a") as a:
        assert "a runs already, at http://a" in await refused(store, second)
        freeze(a)
        await claim(store, "a", second, "here 7", KEY)  # it has the folder's lock, so the other is dead: no wait
    async with a:
        await until(lambda: a.is_lost)
        with pytest.raises(Fenced, match="another one has its name"):
            a.require()


async def test_what_is_forgotten_never_comes_back(another: Another) -> None:
    store = another()
    async with joined(another(), "a") as a, joined(another(), "b") as b:
        with pytest.raises(FieldOutOfRange, match="a lives, at http://a"):
            await declare_dead(store, "a", is_lost=True)
        with pytest.raises(FieldOutOfRange, match=r"no replica 'c'; it knows: a, b"):
            await declare_dead(store, "c", is_lost=True)
        freeze(a)
        await until(lambda: set(b.members) == {"b"})
        assert await declare_dead(store, "a", is_lost=True) == JOURNAL
        await until(lambda: JOURNAL in b.buried)
        assert b.renewed == {"a"}
        await until(lambda: b.is_lost)  # it has the same journal
        await claim(store, "a", replace(FIRST, journal="2222", attempt="new"), "here 8", KEY)
        async with a:
            await until(lambda: a.is_lost)
    assert "was given up by djinn cluster forget" in await refused(store, replace(FIRST, start=9, attempt="again"))


async def test_a_store_that_has_lost_all_learns_it_again(another: Another) -> None:
    store = another()
    async with joined(another(), "a") as a:
        a.held = lambda: ["name"]
        for key in {**await store.read_all("fleet/"), **await store.read_all("place/")}:
            await store.swap(key, await store.read(key), None)
        while await a.find("name") is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert "older copy" in await refused(store, replace(FIRST, attempt="second"))


async def test_only_replicas_with_the_clusters_key_are_there(another: Another) -> None:
    async with joined(another(), "a") as a:
        with pytest.raises(FieldOutOfRange, match="cluster_key_file: a at http://a has another key"):
            await claim(another(), "b", replace(FIRST, journal="2222", attempt="b"), "", OTHER_KEY)
        b, c = me("b"), me("c").proven(KEY)
        for name, entry in {"b": b, "c": replace(c, url="http://stranger"), "d": c, "e": b.proven(OTHER_KEY)}.items():
            await another().lend(f"fleet/member/{name}", claims.encode(entry), 60.0)
        await another().lend("fleet/member/c2", claims.encode(me("c2").proven(KEY)), 60.0)
        await until(lambda: "c2" in a.members)
        assert set(a.members) == {"a", "c2"}
