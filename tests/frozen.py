"""Imported last by the process that test servers are forks of, so that they never copy what it has imported.

Each server collects garbage when it has started. That would go through all of these objects, and write to their pages.
"""

import gc

gc.collect()
gc.freeze()
