# Generated from client/_async by `python client/_generate.py`: make changes there.
"""One half of the client."""
