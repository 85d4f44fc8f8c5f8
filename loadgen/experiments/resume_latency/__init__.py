"""A stopped computation brought back, recomputed, and copied by hand."""
