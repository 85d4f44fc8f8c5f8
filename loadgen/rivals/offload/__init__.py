"""Transformers with others' offload of weights, to hold a server against: programs that answer lines of JSON.

`{"model", "dtype", "budget_bytes", "folder"}` comes first: a Transformers folder, how many bytes of weights the device
may have where that can be told, and a scratch folder. `{"prompts", "tokens"}` then generates so many tokens greedily
after prompts of one length.
"""
