"""Engines in this process, as the server runs them, and what is measured on them without HTTP."""
