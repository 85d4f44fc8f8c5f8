"""Who computes next: the queue of turns, what is fair between tenants, the rows of a step, and a turn's life."""
