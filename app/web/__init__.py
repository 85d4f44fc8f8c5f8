"""HTTP for every route: bodies, event streams, the listening server."""
