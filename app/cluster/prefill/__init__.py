"""Prompts that one server computes for another, so that those who decode there do not notice them."""
