"""Open sessions: their registry, their turns, breakpoints and pauses."""
