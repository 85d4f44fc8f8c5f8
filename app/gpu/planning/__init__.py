"""Which rows run in the next step, and the life of a turn."""
