"""Engines that compute nothing, and an app on one of them."""

import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from app.domain.values import ModelInfo
from app.engine_process.executor import Deliver
from app.grammars.compiler import Grammars
from app.journal.journal import Journal
from app.main import create_app
from app.messages import Command
from app.model_store.resolve import resolve
from app.model_store.saved import ModelTokenizer
from app.tenants.tenancy import Tenancy
from app.text.tokenizer import Tokens
from tests.hugging_face import byte_tokenizer
from tests.serving import tiny_settings


@dataclass
class DyingEngine:
    """Takes commands, answers none, and dies when told to."""

    info: ModelInfo
    grammars: Grammars = field(default_factory=lambda: Grammars(resolve("random:tiny-llama", cache_dir=Path()), 512))
    die: threading.Event = field(default_factory=threading.Event)

    def send(self, command: Command) -> None:
        pass

    def give(self, connection: socket.socket) -> int:
        raise OSError("it takes no connections")

    def run(self, deliver: Deliver) -> None:
        self.die.wait(10)
        raise RuntimeError("out of memory")

    def stop(self) -> None:
        self.die.set()


@dataclass
class TalkingEngine(DyingEngine):
    """Delivers the events that the test gives it, all at once."""

    deliver: Deliver | None = None
    runs: threading.Event = field(default_factory=threading.Event)

    def run(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self.runs.set()
        self.die.wait(10)


def app_of(engine: DyingEngine, journal: Journal | None = None, **changed: Any) -> FastAPI:
    settings, tokens = tiny_settings(**changed), Tokens(ModelTokenizer.of(byte_tokenizer(512)), frozenset())
    return create_app(settings, engine, tokens, Tenancy(settings, time.time), journal)
