"""Grammars that hold a turn's text to a form: compiled with llguidance, and matched token by token."""
