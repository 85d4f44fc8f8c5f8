"""Durable sessions: a SQLite file, and the thread that writes it."""
