"""The cost of grammars for sessions that decode, and the schemas that they hold."""
