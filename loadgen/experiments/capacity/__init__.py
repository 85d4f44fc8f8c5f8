"""The parts of the capacity experiment: how many agents a server holds within limits."""
