"""`djinn chat`: a conversation in a session, and the commands between its lines."""
