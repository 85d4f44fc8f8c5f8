"""Whatever ends, hangs, vanishes or comes back: no turn is wrong or lost, no name has two sessions, no wait is long."""

import asyncio
import itertools
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app.cli import main
from app.cluster.wires import SILENT_S, Wire, WireLost
from tests.cluster.chaos import AUTHORIZATION, DOOR, MOST_S, OWN_ENGINE, Agent, Cluster, Load, Network, enter
from tests.cluster.pair import MODEL
from tests.orderly import serve_thread
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.flaky(reruns=0)]  # one wrong token in many runs is a fault
AWAY_S = 8.0
"""More than the lease of a replica."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    network = Network()
    with network.there(), Cluster(tmp_path_factory.mktemp("chaos"), network).running() as found:
        yield found


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serve_thread(tmp_path_factory.mktemp("twin") / "state") as (_, http):
        yield http


@pytest.fixture
def load(cluster: Cluster, twin: httpx.Client) -> Iterator[Load]:
    with Load(twin) as found:
        yield found


def ready(cluster: Cluster, node: int) -> bool:
    try:
        return httpx.get(f"{cluster.url(node)}/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def elsewhere(load: Load, node: int) -> list[Agent]:
    """Agents whose sessions are not there."""
    return [each for each in load.agents if each.home != node]


def test_a_rolling_restart(cluster: Cluster, load: Load) -> None:
    for node in (0, 1, 2):
        cluster.end(node)
        cluster.start(node)
        load.go_on(1)


@pytest.mark.parametrize("what", ["server", "engine"])
def test_a_server_or_its_engine_stands_still(cluster: Cluster, load: Load, what: str) -> None:
    with cluster.suspended(what):
        time.sleep(AWAY_S)
        load.go_on(2, agents=elsewhere(load, OWN_ENGINE))
    wait_until(lambda: ready(cluster, OWN_ENGINE))


def test_a_node_vanishes_while_sessions_move_to_it_and_from_it(
    cluster: Cluster, load: Load, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJINN_API_KEY", "sesame")
    with ThreadPoolExecutor(4) as pool:
        for there, each in itertools.product(("r1", "r2") * 100, elsewhere(load, 0)):
            path = f"{DOOR}/v1/sessions/{each.session}/move"
            pool.submit(httpx.post, path, json={"replica": there}, headers=AUTHORIZATION, timeout=2 * MOST_S)
        load.go_on(1)
        with cluster.network.cut(2):
            pool.shutdown(wait=False, cancel_futures=True)
            time.sleep(AWAY_S)
            load.go_on(2, agents=[each for each in load.agents if each.home == 0])
            assert main(["ps", "--url", DOOR]) == 0
            assert capsys.readouterr().out.startswith("! replica r2 is away")
    wait_until(lambda: ready(cluster, 2))


def test_a_request_that_was_given_up_never_arrives(cluster: Cluster) -> None:
    """Its client repeats it, and goes on. Then it would undo later turns."""
    address, asked = ("10.77.3.2", 9000), [(b"host", b"r3")]
    heard, ends = bytearray(), list[Wire | asyncio.WriteTransport]()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer.transport)
        while part := await reader.read(100):
            heard.extend(part)

    async def give_up() -> None:
        listening = await asyncio.start_server(hear, sock=listener)
        waits, aborted, lost = [await Wire.open(address) for _ in range(3)]
        with cluster.network.cut(3):
            tries = [asyncio.create_task(each.ask(b"GET", b"/", asked, b"")) for each in (waits, aborted)]
            await asyncio.sleep(0.1)
            aborted.abort()
        await asyncio.sleep(2)  # after 0.2, 0.6 and 1.4 s the system sends again
        with cluster.network.cut(3), pytest.raises(WireLost):
            await asyncio.wait_for(lost.ask(b"GET", b"/", asked, b""), 2 * SILENT_S)
        listening.close()
        for end in (waits, *ends):
            end.abort()
        await asyncio.gather(*tries, return_exceptions=True)

    with ThreadPoolExecutor(1, initializer=enter, initargs=(cluster.network.path(3),)) as pool:
        listener = pool.submit(socket.create_server, address).result()
    asyncio.run(give_up())
    assert heard.count(b"GET") == 1


def test_the_store_dies(cluster: Cluster, load: Load) -> None:
    """Known sessions go on. A new name waits."""
    for each in load.agents:
        each.refusals.clear()
    cluster.etcd.kill()
    time.sleep(AWAY_S)
    load.go_on(3)
    new = httpx.post(
        f"{cluster.url(0)}/v1/completions",
        json={"model": MODEL, "prompt": [5], "max_tokens": 1},
        headers={**AUTHORIZATION, "X-Session-ID": "new"},
    )
    assert (new.status_code, new.json()["error"]["code"]) == (503, "directory_away")
    assert not (found := [each.refusals for each in load.agents if each.refusals]), found
    cluster.etcd.start()
    load.go_on(1)


def test_a_door_dies_and_its_folder_is_copied_and_emptied(cluster: Cluster, load: Load) -> None:
    folder, kept = cluster.folder / "r2", cluster.folder / "kept"
    cluster.kill(2)
    shutil.copytree(folder, cluster.folder / "r3", ignore=shutil.ignore_patterns("kv"))
    folder.rename(kept)
    assert "is its volume mounted?" in cluster.refused(2, "r2")
    load.go_on(2, agents=elsewhere(load, 2))
    kept.rename(folder)
    cluster.start(2)
    assert "older copy" in cluster.refused(3, "r2")


def test_several_doors_choose_for_one_name(cluster: Cluster, load: Load) -> None:
    body, agent = {"model": MODEL, "prompt": [5], "max_tokens": 1}, Agent(0)
    urls = [f"{cluster.url(door)}/v1/completions" for door in (0, 1, 2)] * 2
    with agent.http, ThreadPoolExecutor() as pool:
        for number in range(20):
            name = {"X-Session-ID": f"both {number}"}
            asked = [pool.submit(agent.ask, "POST", url, name, body) for url in urls]
            assert len({each.result().headers["X-Session-ID"] for each in asked}) == 1


def test_a_replica_comes_and_goes(cluster: Cluster, load: Load) -> None:
    cluster.start(3)
    path, headers = f"{cluster.url(0)}/v1/sessions/{load.agents[0].session}/move", AUTHORIZATION
    wait_until(lambda: httpx.post(path, json={"replica": "r3"}, headers=headers, timeout=15).status_code == 200)
    load.go_on(2)
    cluster.end(3)
    load.go_on(2)
