"""Several servers as one: which there are, which session is where, sessions that move, and requests that follow."""
