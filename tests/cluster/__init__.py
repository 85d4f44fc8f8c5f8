"""Sessions that move between servers."""
