"""Between text and tokens, and from the tokens of a turn to its text."""
