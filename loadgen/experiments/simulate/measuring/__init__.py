"""Real servers beside the simulation: what their work costs, and whether the same trace ends alike."""
