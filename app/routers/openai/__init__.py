"""The routes of the OpenAI surface."""
