"""The experiments' command lines: options in, an exit code out."""
