"""The cluster's store in etcd, through the JSON gateway of its API v3.

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/: keys and values are base64, and 64-bit numbers are strings. A
range of keys ends before a key; a prefix's range ends before the prefix with its last byte raised by one.
"""

from __future__ import annotations

import base64
import json
import math
import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import httpx

from app.cluster.store import Store, refusal
from app.domain.errors import DirectoryAway

SCHEMES = {"etcd": "http", "etcds": "https"}
SERVER = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^][:/\s]+):[1-9][0-9]{0,4}")
CONNECT_S, ANSWER_S = 1.0, 2.0
ROOT = "djinn"
NOT_FOUND, UNAUTHENTICATED = 5, 16
"""gRPC's codes for a lease and for a token that have expired."""
FILES = ("ca", "cert", "key")
"""What an address may name behind its `?`: files for TLS."""


class EtcdStore(Store):
    """It asks one of its servers, and the next one if that does not answer."""

    def __init__(self, text: str) -> None:
        """`text` is `etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/PREFIX]`, or `etcds://` for TLS, with
        `?ca=FILE&cert=FILE&key=FILE`. Raises `FieldOutOfRange`.
        """
        parts = urlsplit(text)
        login, _, hosts = parts.netloc.rpartition("@")
        user, has_password, password = login.partition(":")
        if login and not (user and has_password):
            raise refusal("a user needs a password: etcd://USER:PASSWORD@HOST:PORT")
        for host in hosts.split(","):
            if not SERVER.fullmatch(host):
                raise refusal(f"{host[:100]!r} is no server of etcd: it needs HOST:PORT, such as 10.0.0.5:2379")
        self._login = {"name": unquote(user), "password": unquote(password)} if login else None
        self.shown = f"{parts.scheme}://{hosts}{parts.path}"
        self._urls = [f"{SCHEMES[parts.scheme]}://{host}" for host in hosts.split(",")]
        self._root = f"{parts.path.strip('/') or ROOT}/"
        self._token: str | None = None
        self._lease: str | None = None
        self._lent: str | None = None
        """The value that was written with the lease. Only one key is lent."""
        self._client = httpx.AsyncClient(
            verify=_tls(parts),
            trust_env=False,  # a proxy for the web is none for it
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        )

    async def read(self, key: str) -> str | None:
        # That key alone: etcd counts all keys of a range, also beyond the limit.
        found = (await self._ask("kv/range", {"key": self._key(key)})).get("kvs")
        return _text(found[0].get("value", "")) if found else None

    async def read_all(self, prefix: str, after: str = "", most: int = 0) -> dict[str, str]:
        # Without a sort they come by key, and etcd stops at the limit. With one it reads the whole range first.
        asked = {**self._range(prefix), "limit": most}
        if after:
            asked["key"] = self._key(f"{after}\0")
        answer = await self._ask("kv/range", asked)
        found = {_text(each["key"]): _text(each.get("value", "")) for each in answer.get("kvs", [])}
        return {key.removeprefix(self._root): value for key, value in found.items()}

    async def swap(self, key: str, before: str | None, after: str | None) -> bool:
        name = self._key(key)
        is_new = {"target": "CREATE", "create_revision": "0"}
        condition = is_new if before is None else {"target": "VALUE", "value": _base64(before)}
        change: dict[str, Any] = {"request_delete_range": {"key": name}}
        if after is not None:
            change = {"request_put": {"key": name, "value": _base64(after)}}
        asked = {"compare": [{"key": name, "result": "EQUAL", **condition}], "success": [change]}
        return bool((await self._ask("kv/txn", asked)).get("succeeded"))

    async def lend(self, key: str, value: str, seconds: float) -> bool:
        # etcd counts whole seconds, and has a least.
        is_on = False
        if self._lease is not None:
            said = await self._ask("lease/keepalive", {"ID": self._lease})
            if "result" not in said:  # the answer is a stream, whose errors have no status
                raise DirectoryAway(f"{self.shown} renews no lease: {said.get('error')}")
            is_on = int(said["result"].get("TTL", 0)) > 0
        if not is_on:
            self._lent, self._lease = None, str((await self._ask("lease/grant", {"TTL": math.ceil(seconds)}))["ID"])
        if value != self._lent:
            body = {"key": self._key(key), "value": _base64(value), "lease": self._lease}
            if (await self._ask("kv/put", body)).get("code") == NOT_FOUND:
                raise DirectoryAway(f"{self.shown}: a lease has run out at once")
            self._lent = value
        return is_on

    async def take_back(self, key: str) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._ask("lease/revoke", {"ID": lease})

    async def watch(self, prefix: str, within_s: float) -> AsyncGenerator[None, None]:
        # A stream that is silent for so long is replaced: its server may be gone. It begins with what comes next, so it
        # never needs what etcd has compacted.
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=within_s)
        while True:
            body = json.dumps({"create_request": self._range(prefix)})
            headers = await self._headers()
            try:
                url = f"{self._urls[0]}/v3/watch"
                async with self._client.stream("POST", url, content=body, headers=headers, timeout=timeout) as answer:
                    async for line in answer.aiter_lines():
                        said = json.loads(line)
                        if answer.status_code != httpx.codes.OK or "error" in said or said["result"].get("canceled"):
                            self._token = None
                            raise DirectoryAway(f"{self.shown} ends a watch: {line[:200]}")
                        yield
            except httpx.ReadTimeout:
                continue
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self._give_way(self._urls[0])
                raise DirectoryAway(f"{self.shown} does not answer: {error!r}") from error

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _ask(self, path: str, body: Mapping[str, Any], *, with_login: bool = True) -> dict[str, Any]:
        """The first answer of a server, which for an expired lease has the `code` `NOT_FOUND`. Raises `DirectoryAway`.
        A change may be made twice, with the same value, so the caller of a `swap` looks again.
        """
        failure = "no server"
        for url in list(self._urls):
            had_token = self._token is not None
            headers = await self._headers() if with_login else {}
            try:
                answer = await self._client.post(f"{url}/v3/{path}", json=body, headers=headers)
                said: dict[str, Any] = answer.json()
            except (httpx.HTTPError, ValueError) as error:
                failure = repr(error)
                self._give_way(url)
                continue
            code = said.get("code")
            if answer.is_success or code == NOT_FOUND:
                return said
            failure = str(said.get("message") or said.get("error"))
            if code == UNAUTHENTICATED and had_token:  # a restart of the server ends tokens
                self._token = None
                return await self._ask(path, body)
            self._give_way(url)
        raise DirectoryAway(f"{self.shown} does not answer: {failure}")

    async def _headers(self) -> dict[str, str]:
        """The headers with the login's token. Raises `DirectoryAway`."""
        if self._login is None:
            return {}
        if self._token is None:
            said = await self._ask("auth/authenticate", self._login, with_login=False)
            self._token = str(said.get("token", ""))
        return {"authorization": self._token}

    def _give_way(self, url: str) -> None:
        """Ask another server first from now on."""
        if self._urls[0] == url:
            self._urls.append(self._urls.pop(0))

    def _key(self, key: str) -> str:
        return _base64(f"{self._root}{key}")

    def _range(self, prefix: str) -> dict[str, str]:
        first = f"{self._root}{prefix}".encode()
        return {"key": _base64(first), "range_end": _base64(first[:-1] + bytes([first[-1] + 1]))}


def _base64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def _tls(parts: SplitResult) -> ssl.SSLContext | bool:
    """Raises `FieldOutOfRange`."""
    files = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := sorted(files.keys() - set(FILES)):
        raise refusal(f"{unknown[0]!r} is none of {', '.join(FILES)}, the files for TLS")
    if parts.scheme == "etcd":
        if files:
            raise refusal("files for TLS need etcds://")
        return False
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except (OSError, ssl.SSLError) as error:
        raise refusal(f"the files for TLS cannot be used: {error}") from error
    return context
