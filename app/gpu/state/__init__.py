"""A session as the engine sees it: tokens, blocks, its turn, its edits, checkpoints and captures."""
