"""Which replica a request is for: what it names, which replica had that, and which has it now."""
