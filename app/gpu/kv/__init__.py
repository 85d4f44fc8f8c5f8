"""Where each session's KV is: memory and files for it, its moves between them, and who gives way to whom."""
