"""Programs that call a generated client. Each runs where that client is, and fails if an answer is wrong."""
