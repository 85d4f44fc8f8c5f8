"""The device itself: streams, memory, staging, data types."""
