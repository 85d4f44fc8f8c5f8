"""What an expert would write by hand, or run with another library, to do what Djinn does. Programs of their own."""
