"""What pausing, resuming and steering cost, and what they cost others."""
