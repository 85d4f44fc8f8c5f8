"""Commands that are no experiments."""
