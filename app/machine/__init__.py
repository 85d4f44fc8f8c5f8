"""What the operating system says of this machine, and of what this process may have of it."""
