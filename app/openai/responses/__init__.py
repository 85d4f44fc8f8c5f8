"""OpenAI's Responses API: bodies, items, events, and the responses that the server keeps."""
