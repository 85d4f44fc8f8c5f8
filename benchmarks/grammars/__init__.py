"""What grammars cost sessions that decode, and how many schemas they hold."""
