"""Anthropic's Messages API: bodies and answers of its routes."""
