"""The parts of the density experiment: what it reports, and how that is shown."""
