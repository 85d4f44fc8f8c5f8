"""HTTP for every route: keys, limits of bodies, errors, event streams, the listening server."""
