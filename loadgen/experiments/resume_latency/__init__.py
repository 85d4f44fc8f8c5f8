"""Parts of the resume-latency experiment: one paused session, and three ways to be back where it was."""
