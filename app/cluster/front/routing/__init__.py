"""Which replica a request is for: what it names, who has that, and who has it by now."""
