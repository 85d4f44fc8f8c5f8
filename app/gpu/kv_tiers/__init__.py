"""Where the KV of each session is, and when it moves: policies, phases, prefetch."""
