"""What the open page costs agents."""
