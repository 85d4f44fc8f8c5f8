"""The live stream of what happens to sessions."""
