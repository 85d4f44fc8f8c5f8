"""A model larger than the memory it is given, streamed through it at every pass."""
