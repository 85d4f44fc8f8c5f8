"""Whether the engine thread gets on, for a thread that watches it."""


class Progress:
    """The engine thread changes it. Another may read it at any time."""

    def __init__(self) -> None:
        self.count = 0
        """Grows with each message, layer and step: it stands still while the thread is busy with one thing."""
        self.is_idle = True
        """Whether the thread waits for messages."""

    def note(self) -> None:
        """The thread begins something else."""
        self.count += 1
        self.is_idle = False

    def rest(self) -> None:
        """The thread has nothing to do until a message comes."""
        self.is_idle = True
