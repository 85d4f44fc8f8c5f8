"""The meter against work that this test does itself."""

import os
import time

from benchmarks.cpu_meter import CpuMeter, busy_cpu_s


def burn(cpu_s: float) -> None:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass


def test_work_that_is_not_owned_counts_as_others() -> None:
    cores = list(range(os.cpu_count() or 1))
    meter = CpuMeter(cores, own_cpu_s=lambda: 0.0)
    burn(0.3)
    assert meter.other_share() >= 0.5 / len(cores)


def test_owned_work_does_not() -> None:
    cores = [max(os.sched_getaffinity(0))]
    everything = CpuMeter(cores, own_cpu_s=lambda: busy_cpu_s(cores))
    burn(0.5)
    assert everything.other_share() < 0.05
