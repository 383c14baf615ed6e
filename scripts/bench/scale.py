"""CPU times as a machine of known speed would show them.

Owns the yardstick: a loop of plain Python whose time was 75 µs on the machine that the targets were written for. A
figure is its measured time multiplied by `factor()`, taken beside the sample and on the same clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

REFERENCE_S = 75e-6
LOOPS = 3


def loop_s(clock: Callable[[], float]) -> float:
    """Seconds of one run of the yardstick."""
    total = 0
    began = clock()
    for i in range(1500):
        total += i
    return clock() - began


def factor(clock: Callable[[], float] = time.thread_time) -> float:
    """What a time measured now is to be multiplied by; the median of a few loops, about 0.2 ms."""
    return REFERENCE_S / statistics.median(loop_s(clock) for _ in range(LOOPS))
