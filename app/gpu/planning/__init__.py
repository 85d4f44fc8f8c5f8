"""The queue of turns, the rows of the next step, and the life of a turn."""
