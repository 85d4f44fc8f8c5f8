"""Is the load generator right? The same load by it and by GuideLLM, which others wrote, on one Djinn server."""
