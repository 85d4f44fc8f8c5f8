"""What a session's KV is made of, and what it costs to keep and to move."""
