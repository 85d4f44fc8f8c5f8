"""Faults to plant: each patch breaks one thing that a user would notice, and the tests must fail with it.

`python -m tests.mutants` plants each in a copy of the tree and runs what `make test` runs; with `--all` what
`make test-all` runs. A patch begins with a sentence that says what is wrong, and names the tests to try first.
"""
