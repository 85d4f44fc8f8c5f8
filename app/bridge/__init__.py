"""Between the event loop and the engine thread: commands go over with a ticket, events come back by it."""
