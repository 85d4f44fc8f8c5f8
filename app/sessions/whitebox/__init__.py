"""What clients see and change inside the model of a session: breakpoints, checkpoints, maps, vectors."""
