"""One program for each framework. Each runs in the frameworks' environment: `PROGRAM URL MODEL` prints JSON."""
