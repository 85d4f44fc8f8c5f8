"""What etcd does beside keeping keys: it dies and comes back, forgets what is old, and asks who is there."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from app.cluster import membership
from app.cluster.claims import open_store
from app.domain.errors import DirectoryAway, FieldOutOfRange
from tests.cluster.etcd import running_etcd
from tests.cluster.pair import free_port
from tests.cluster.test_membership import joined, short_leases
from tests.waiting import until

__all__ = ["short_leases"]


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert", folder / "key"
    files = ["-keyout", str(key), "-out", str(cert)]
    about = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=etcd -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *about.split(" "), *files], check=True, capture_output=True)
    return cert, key


async def test_replicas_go_on_while_it_is_away(tmp_path: Path) -> None:
    with running_etcd(tmp_path / "etcd") as own:
        address = f"etcd://127.0.0.1:{free_port()},{own.host}"  # nothing answers at the first
        one, two = open_store(address), open_store(own.url)
        async with joined(one, "a") as a, joined(two, "b") as b:
            await until(lambda: "b" in a.members)
            assert await a.swap("name", None, "a") == "a"
            own.kill()
            await until(lambda: a.is_away and b.is_away)
            await asyncio.sleep(1.5 * membership.FENCE_S)
            for each in (a, b):
                each.require()
                assert set(each.members) == {"a", "b"}
            with pytest.raises(DirectoryAway, match=f"{address} does not answer"):
                await a.swap("name", None, "b")
            own.start()
            seen = set[frozenset[str]]()
            for _ in range(40):
                await asyncio.sleep(0.05)
                seen |= {frozenset(a.members), frozenset(b.members)}
            assert seen == {frozenset({"a", "b"})}
            await until(lambda: not (a.is_away or b.is_away))
            assert await b.swap("name", None, "b") == "a"
            revision = (own.ask("kv/range", key="AA==")["header"])["revision"]  # type: ignore[index]
            own.ask("kv/compaction", revision=revision)
            b.say(ready=True, left=False, load=None)
            await until(lambda: a.members["b"].ready)
        for store in (one, two):
            await store.aclose()


async def test_a_user_with_a_password_over_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with running_etcd(tmp_path / "etcd", "--cert-file", str(cert), "--key-file", str(key)) as own:
        for name in ("root", "djinn"):
            own.ask("auth/user/add", name=name, password=f"{name}'s")
            own.ask("auth/role/add", name=name)
            own.ask("auth/user/grant", user=name, role=name)
        allowed = {"permType": "READWRITE", "key": "ZGppbm4v", "range_end": "ZGppbm4w"}  # djinn/ and all below
        own.ask("auth/role/grant", name="djinn", perm=allowed)
        own.ask("auth/enable")
        store = open_store(f"etcds://djinn:djinn%27s@{own.host}?ca={cert}")
        assert store.shown == f"etcds://{own.host}"
        async with joined(store, "a") as a:
            own.kill()  # its tokens end with it
            own.start()
            await until(lambda: not a.is_away)
            assert await a.swap("name", None, "a") == "a"
        await store.aclose()
        for address, why in {
            f"etcds://djinn:no@{own.host}?ca={cert}": "authentication failed",
            f"etcds://{own.host}?ca={cert}": "user name is empty",
            f"etcds://djinn:djinn%27s@{own.host}": "certificate verify failed",
            f"etcds://djinn:djinn%27s@{own.host}/other?ca={cert}": "permission denied",
        }.items():
            stranger = open_store(address)
            with pytest.raises(DirectoryAway, match=why):
                await stranger.read("x")
            await stranger.aclose()


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("consul://x:1", "must be etcd://"),
        ("folder:", "must be etcd://"),
        ("etcd://host", "needs HOST:PORT"),
        ("etcd://a:1,b:x", "needs HOST:PORT"),
        ("etcd://me@a:1", "a user needs a password"),
        ("etcd://a:1?ca=f", "need etcds://"),
        ("etcds://a:1?crt=f", "'crt' is none of ca, cert, key"),
        ("etcds://a:1?ca=/no/such", "cannot be used"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(address: str, why: str) -> None:
    with pytest.raises(FieldOutOfRange, match=why):
        open_store(address)
