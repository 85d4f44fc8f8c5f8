"""Lines of the log: their form, and the request that each is about."""
