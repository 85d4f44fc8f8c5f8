"""What can be measured: one folder for each experiment, with its command."""
