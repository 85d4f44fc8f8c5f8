"""A server with known delays: `python -m loadgen.selfcheck.stub`.

It speaks as much of OpenAI's protocol as the load generator needs. Every event of a completion has a fixed time after
the arrival of its request, so that one that is late does not push back those that follow. It answers from the event
loop's own callbacks: what a web framework takes for itself would count as the load generator's error.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import h11

MODEL = "stub"
READY_LINE = "the stub listens on port "


@dataclass(slots=True)
class Stub:
    """Answers with the first token after `ttft_s` and each further one `gap_s` later.

    `first_s` and `gaps_s` are what it really did: from a request's first bytes, or from the event before, to handing an
    event to the socket.
    """

    ttft_s: float
    gap_s: float
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Connection(asyncio.Protocol):
    """One connection to the stub, with one request after the other."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER)
        self._target = b""
        self._body = b""
        self._arrived: float | None = None
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._arrived is None:
            self._arrived = self._loop.time()
        self._http.receive_data(data)
        self._read()

    def _read(self) -> None:
        """Take in what has come; a request that is whole is answered."""
        while True:
            match self._http.next_event():
                case h11.Request() as request:
                    self._target, self._body = request.target, b""
                case h11.Data() as part:
                    self._body += part.data
                case h11.EndOfMessage():
                    self._answer()
                case h11.ConnectionClosed():
                    self._transport.close()
                    return
                case _:
                    return

    def _answer(self) -> None:
        body = json.loads(self._body) if self._body else {}
        match self._target:
            case b"/v1/models":
                self._answer_whole({"data": [{"id": MODEL}]})
            case b"/tokenize":  # a token per character
                self._answer_whole({"tokens": [ord(character) for character in body["prompt"]]})
            case b"/v1/completions" if body.get("stream"):
                self._answer_in_events(body["max_tokens"], len(body["prompt"]))
            case b"/v1/completions":
                self._answer_whole({"choices": [{"text": "a", "token_ids": [97]}]})
            case b"/done":
                self._answer_whole({"first_s": self._stub.first_s, "gaps_s": self._stub.gaps_s})
            case _:
                self._answer_whole({"detail": "Not Found"}, status=404)

    def _answer_whole(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(text)))]
        self._send(h11.Response(status_code=status, headers=headers), h11.Data(data=text), h11.EndOfMessage())
        self._end()

    def _answer_in_events(self, tokens: int, prompt_tokens: int) -> None:
        assert self._arrived is not None
        self._last = self._arrived
        self._send(h11.Response(status_code=200, headers=[("Content-Type", "text/event-stream")]))
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        self._say_at(self._arrived + self._stub.ttft_s, tokens, usage)

    def _say_at(self, due: float, left: int, usage: dict[str, int]) -> None:
        self._timer = self._loop.call_at(due, self._say, due, left, usage)

    def _say(self, due: float, left: int, usage: dict[str, int]) -> None:
        """One event; the next comes when that is due, and after the last the end."""
        now = self._loop.time()
        kept = self._stub.first_s if self._last == self._arrived else self._stub.gaps_s
        kept.append(now - self._last)
        self._last = now
        self._send(_event({"choices": [{"index": 0, "text": " token", "token_ids": [97], "finish_reason": None}]}))
        if left > 1:
            self._say_at(due + self._stub.gap_s, left - 1, usage)
            return
        self._send(_event({"choices": [], "usage": usage}), h11.Data(data=b"data: [DONE]\n\n"), h11.EndOfMessage())
        self._end()

    def _send(self, *events: h11.Event) -> None:
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))

    def _end(self) -> None:
        """The next request may come on this connection, if the client keeps it."""
        self._arrived = self._timer = None
        if self._http.our_state is h11.MUST_CLOSE:
            self._transport.close()
        else:
            self._http.start_next_cycle()


def _event(content: dict[str, Any]) -> h11.Data:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    return h11.Data(data=b"data: " + json.dumps(head | content).encode() + b"\n\n")


async def serve(stub: Stub) -> None:
    """Listen on a free port of the loopback address and print it; for ever."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(stub), "127.0.0.1", 0, backlog=1024)
    print(f"{READY_LINE}{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.selfcheck.stub", description=__doc__)
    parser.add_argument("--ttft", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--gap", type=float, required=True, metavar="SECONDS")
    options = parser.parse_args()
    asyncio.run(serve(Stub(options.ttft, options.gap)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
