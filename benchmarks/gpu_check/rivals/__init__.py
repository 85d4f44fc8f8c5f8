"""What Djinn is held against, on models of the same shape."""
