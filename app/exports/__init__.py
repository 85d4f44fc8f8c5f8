"""Sessions as files: out of a server, and into another."""
