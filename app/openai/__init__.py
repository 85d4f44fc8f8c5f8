"""The OpenAI surface: bodies and answers of its routes."""
