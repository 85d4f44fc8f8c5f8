"""What turns cost their owners."""
