"""How fast KV moves between the tiers, and what a session that has been away pays for it."""
