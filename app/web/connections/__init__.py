"""Connections of clients: how many there may be, how long each may keep the server waiting, and who gives way."""
