"""A folder of files for browsers: found by name, known by their content, with the policy that pages run under."""

import asyncio
import gzip
import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from fastapi import Request, Response

MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""By suffix, whatever the machine's own table says. Any other file is plain text."""
PLAIN_TEXT = "text/plain; charset=utf-8"
COMPRESSED = frozenset({".png", ".woff2"})
"""Suffixes of files that gzip makes no smaller."""

INLINE_SCRIPT = re.compile(rb"<script\b(?![^>]*\bsrc=)[^>]*>(.*?)</script>", re.DOTALL)
POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
GZIP_ACCEPTED = re.compile(r"\s*(gzip|\*)\s*(;\s*q\s*=\s*(1|0?\.\d*[1-9]\d*|1\.0*)\s*)?", re.ASCII)
VERSION = re.compile(r"(v-[0-9a-f]{16})/(.*)")
"""Before the name of a file."""
LASTING = "public, max-age=31536000, immutable"


class StaticFolder:
    """The files that were under `folder` at the start. A file that is edited later is read again.

    Pages refer to files by `prefix`. As they are sent, a version of all files follows it. Browsers keep a file of such
    a name for good, and ask for it again when a page names another version.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        self._references = re.compile(rf'(?<=["/]){re.escape(prefix)}'.encode())

    async def respond(self, request: Request, name: str) -> Response | None:
        """The answer to a request for the file of this name, maybe behind a version; None if there is none."""
        versioned = VERSION.fullmatch(name)
        version, name = versioned.groups() if versioned else ("", name)
        path = self._paths.get(name)
        if path is None:
            return None
        # To compress a large one takes a fifth of a second.
        content, gzipped, headers = await asyncio.to_thread(self._read, path, version)
        if _names(request.headers.getlist("if-none-match"), headers["ETag"]):
            return Response(
                status_code=304, headers={name: value for name, value in headers.items() if name != "Content-Type"}
            )
        accepted = ",".join(request.headers.getlist("accept-encoding")).split(",")
        if gzipped is not None and any(map(GZIP_ACCEPTED.fullmatch, accepted)):
            return Response(gzipped, headers={**headers, "Content-Encoding": "gzip"})
        return Response(content, headers=headers)

    def _read(self, path: Path, asked: str) -> tuple[bytes, bytes | None, dict[str, str]]:
        """Of a page the references have the version. What is `asked` for by the version of now may be kept for good."""
        modified_ns = path.stat().st_mtime_ns
        if path.suffix == ".html":
            return _read(path, modified_ns, self._references, self._version())
        content, gzipped, headers = _read(path, modified_ns, None, "")
        lasts = asked and asked == self._version()  # after the file is read: it may just be replaced
        return content, gzipped, {**headers, "Cache-Control": LASTING} if lasts else headers

    def _version(self) -> str:
        """The version of the files as they are now."""
        digests = ""
        for path in self._paths.values():
            with suppress(FileNotFoundError):
                digests += _digest(path, path.stat().st_mtime_ns)
        return f"v-{hashlib.sha256(digests.encode()).hexdigest()[:16]}"


@lru_cache(maxsize=256)
def _digest(path: Path, _modified_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=256)
def _read(
    path: Path, _modified_ns: int, references: re.Pattern[bytes] | None, version: str
) -> tuple[bytes, bytes | None, dict[str, str]]:
    """The file, also compressed unless that makes it no smaller, and the headers of each answer about it. `version`
    follows its `references`.
    """
    content = path.read_bytes()
    if references is not None:
        content = references.sub(lambda found: found[0] + f"{version}/".encode(), content)
    gzipped = None if path.suffix in COMPRESSED else gzip.compress(content, mtime=0)
    etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'  # weak: it stands for both encodings
    headers = {
        "Content-Type": MEDIA_TYPES.get(path.suffix, PLAIN_TEXT),
        "Content-Security-Policy": policy_of(content if path.suffix == ".html" else b""),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
        "ETag": etag,
    }
    return content, gzipped, headers


def policy_of(page: bytes) -> str:
    """The Content-Security-Policy of a page: all that it loads is this server's, and its inline scripts, such as an
    import map, are those that it has in the file.
    """
    digests = (b64encode(hashlib.sha256(script).digest()).decode() for script in INLINE_SCRIPT.findall(page))
    return POLICY.format(scripts=" ".join(["'self'", *(f"'sha256-{digest}'" for digest in digests)]))


def _names(fields: Iterable[str], etag: str) -> bool:
    """Whether `If-None-Match` names the tag (RFC 9110, 13.1.2)."""
    given = {each.strip().removeprefix("W/") for field in fields for each in field.split(",")}
    return not given.isdisjoint(("*", etag.removeprefix("W/")))
