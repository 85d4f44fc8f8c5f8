"""What each command does to a session, and what it is answered."""
