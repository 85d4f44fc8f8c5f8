"""Parts of the soak: agents run for long, faults come meanwhile, and a server that is spared checks every token."""
