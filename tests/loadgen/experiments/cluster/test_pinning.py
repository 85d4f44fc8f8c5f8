"""Processes on one core."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from loadgen.experiments.cluster.pinning import pin

CHILD = """
import subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(threading.active_count(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins nothing")
def test_all_threads_of_a_process_and_of_its_children_are_pinned() -> None:
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        family = [psutil.Process(child.pid)]
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"2\n"
            family += family[0].children()
            pin(family[0], core)
            threads = [thread.id for process in family for thread in process.threads()]
            assert len(threads) >= 3
            assert {tuple(os.sched_getaffinity(thread)) for thread in threads} == {(core,)}
        finally:
            for process in family:
                process.kill()
