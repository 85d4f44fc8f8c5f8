"""What can be measured: one experiment per file."""
