"""A server from a terminal: what `djinn ps`, `djinn top` and `djinn chat` do. Nothing else of the client imports it."""
