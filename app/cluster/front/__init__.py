"""The front door: finds the replica that a request is for, and pipes both ways without reading what passes."""
