"""One pair of runs after the other on one server."""

import resource
import time
from collections.abc import Callable, Iterator
from itertools import count

from benchmarks.cpu_meter import CpuMeter, session_cpu_s
from benchmarks.generators.comparison import Round
from benchmarks.generators.generator import Endpoint, Generator
from benchmarks.generators.load import Load
from benchmarks.generators.measured import Measured, OtherLoadError, check_load
from loadgen.processes.process import ServerFailedError

MAX_TRIES = 6


class RoundRunner:
    """Measures with both generators on `endpoint`, the server of the POSIX session `server`, all bound to `cores`.

    `on_discard` is told why a pair of runs is measured again.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        generators: tuple[Generator, Generator],
        server: int,
        cores: list[int],
        on_discard: Callable[[str], None],
    ) -> None:
        self._endpoint = endpoint
        self._own, self._rival = generators
        self._server = server
        self._cores = cores
        self._on_discard = on_discard
        self._seeds: Iterator[int] = count()

    def warm_up(self, load: Load) -> None:
        """What is slow only once stays out of the measurement. Raises ServerFailedError."""
        self._own.run(self._endpoint, load, next(self._seeds))

    def run(self, number: int, load: Load) -> Round:
        """The generators take turns at going first. Every try has a seed of its own: no text is ever sent again, so
        that the server's prefix cache helps nobody.

        Raises ServerFailedError if a generator fails, or again and again measures another load.
        """
        for _ in range(MAX_TRIES):
            try:
                return self._try(number, load, next(self._seeds))
            except OtherLoadError as error:
                self._on_discard(str(error))
        raise ServerFailedError(f"{load.name}: no comparable pair of runs in {MAX_TRIES} tries")

    def _try(self, number: int, load: Load, seed: int) -> Round:
        order = (self._own, self._rival) if number % 2 == 0 else (self._rival, self._own)
        meter = CpuMeter(self._cores, lambda: _ended_cpu_s() + session_cpu_s(self._server))
        measured = {generator.name: self._measure(generator, load, seed) for generator in order}
        own, rival = measured[self._own.name], measured[self._rival.name]
        return Round(number, load.name, seed, order[0].name, own, rival, meter.other_share())

    def _measure(self, generator: Generator, load: Load, seed: int) -> Measured:
        measured = generator.run(self._endpoint, load, seed)
        check_load(generator.name, load, measured)
        return measured


def _ended_cpu_s() -> float:
    """CPU seconds of this process and of all that it started and that has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
