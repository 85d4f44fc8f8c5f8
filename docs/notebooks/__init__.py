"""Notebooks for researchers, with what they printed and drew. `python -m docs.notebooks` runs them again."""
