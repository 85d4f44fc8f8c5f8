"""When each step of Transformers' `generate` was over."""

import time


class StepTimes:
    """A streamer for `generate`: notes when each step's tokens come out, as `time.perf_counter` has it."""

    def __init__(self) -> None:
        self._is_prompt = True
        self.seconds: list[float] = []

    def put(self, _tokens: object) -> None:
        """Told the prompt first, then each step's tokens."""
        if not self._is_prompt:
            self.seconds.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""
