"""A decode step on paper, and what the host does for one: which bound holds where, without a GPU."""
