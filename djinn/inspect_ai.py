"""`import djinn.inspect_ai` tells Inspect AI of the provider `djinn`: see `client.inspect_ai`."""

from client.inspect_ai import DjinnAPI as DjinnAPI
