"""Parts of the `weights` experiment: a model larger than the memory it is given, streamed through it at every pass.

Imports nothing: the programs that Djinn is compared with are modules in here that run by themselves.
"""
