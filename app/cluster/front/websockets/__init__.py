"""WebSockets through the front door."""
