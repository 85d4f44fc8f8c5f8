"""The engine in a process of its own: frames over a socket pair, a heartbeat, another engine when one dies."""
