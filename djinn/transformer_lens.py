"""`from djinn.transformer_lens import HookedDjinn`: see `client.transformer_lens`."""

from client.transformer_lens import Edits as Edits
from client.transformer_lens import HookedDjinn as HookedDjinn
