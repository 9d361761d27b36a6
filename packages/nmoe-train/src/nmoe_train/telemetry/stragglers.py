"""Which rank holds the others up: one that is at work for longer than they are, again and again.

Ranks of a step wait for each other, so that all take as long as the slowest. What tells them apart
is the time that each is at work itself, without waiting: that of the step by the host's clock, less
what it spent in collectives and in messages of a pipeline, and less what kernels of RDEP waited for
rows of others. On GPUs a wait inside NCCL is the stream's and is not subtracted: a rank that is
slow on its host between them is seen, one with a slow GPU only where RDEP's kernels wait for it.
"""

from collections.abc import Sequence
from statistics import median

LEAST_EXCESS_MS = 5.0
"""What a rank is slower by at least: a busy host alone makes small steps uneven."""


class Stragglers:
    """Names ranks that take `factor` times the others' median for `steps` steps in a row."""

    def __init__(self, factor: float, steps: int) -> None:
        self._factor, self._steps = factor, steps
        self._slow: dict[int, int] = {}

    def observe(self, own_ms: Sequence[float]) -> list[tuple[int, float]]:
        """Hears each rank's time at work in a step; gives ranks that have just been slow so long.

        With each goes the factor by which this step was slow. A rank is named again only after a
        step in which it was not slow.
        """
        named = []
        for rank, ms in enumerate(own_ms):
            others = [other for place, other in enumerate(own_ms) if place != rank]
            usual = median(others) if others else ms
            slow = ms > self._factor * usual and ms - usual >= LEAST_EXCESS_MS
            self._slow[rank] = self._slow.get(rank, 0) + 1 if slow else 0
            if self._slow[rank] == self._steps:
                named.append((rank, ms / max(usual, 1e-3)))
        return named
