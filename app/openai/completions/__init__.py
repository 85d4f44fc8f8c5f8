"""`/v1/completions`: its body, its answers and their log-probabilities."""
