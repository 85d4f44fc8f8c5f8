"""Hand-written weight streaming, to hold a server against: what an expert would write for one static batch alone.

A program of its own (`python -m loadgen.rivals.double_buffer`). No server, no sessions, no scheduler: two buffers, of
which one is filled while the other is computed with, over and over, and a decoder of the Llama family.
"""
