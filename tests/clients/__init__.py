"""Clients that generators make from the OpenAPI document, run against a server process: `make test-clients`."""
