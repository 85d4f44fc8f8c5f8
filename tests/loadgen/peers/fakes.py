"""A peer whose server is a small real process, for what happens around a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from loadgen.peers.base import Say, ServerSettings
from loadgen.processes.launch import Launch

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("child", child.pid, "of", sys.argv[1], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Lists its models, and has a child in a POSIX session of its own, as Ray's servers do."""

DIES = "import sys; sys.exit('no such model')"


@dataclass(frozen=True)
class FakePeer:
    """Runs `code` with the port as its argument."""

    code: str = SERVER
    name: str = "fake"
    served_model: str = "model"
    installed: bool = True

    def is_installed(self) -> bool:
        return self.installed

    def install(self, say: Say) -> None:
        raise NotImplementedError

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        return Launch([sys.executable, "-c", self.code, str(port)], {"MODEL": str(settings.model)})

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}
