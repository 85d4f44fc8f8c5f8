"""What is asked of a server: arrivals, think times, prompts, traces, and records of the answers."""
