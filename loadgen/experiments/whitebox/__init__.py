"""The parts of the experiment with breakpoints: what is done, what was seen, and how it is told."""
