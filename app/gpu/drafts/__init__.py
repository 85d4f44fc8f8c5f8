"""Drafts: guesses at a turn's next tokens from its own history, what they are worth, and what they cost."""
