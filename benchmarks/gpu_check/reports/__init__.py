"""What the check writes: a journal of each stage, the record of the run, its page."""
