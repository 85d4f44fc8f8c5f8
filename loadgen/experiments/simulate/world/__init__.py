"""What is simulated: servers with their steps and tiers, the front door, the directory, what happens to them."""
