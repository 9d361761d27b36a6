"""How many requests are under way at once: as many as the server takes, found by trying.

The limit doubles with each window of answers until something speaks against it, then grows slowly
and is halved by each refusal for rate (additive increase, multiplicative decrease; Chiu and Jain
1989). Where requests only wait on the other side, latency grows and the rate does not: then the
limit is lowered a little (as in TCP Vegas, Brakmo et al. 1994). `Retry-After` closes the gate for
all requests of the judge.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

FIRST_LIMIT = 8
SHORTEST_WINDOW = 8
# Latency over the best one from which answers are taken to have waited in a queue.
QUEUED = 4.0
# What the rate must have grown by to be worth it, after a step and after a doubling.
BETTER_RATE = 1.05
DOUBLED_RATE = 1.3
LOWERED = 0.75
# Latency after over before lowering, above which lowering made no difference.
SAME = 0.9
FORGOTTEN = 0.95


class AdaptiveLimit:
    """A gate for the requests of one judge.

    most: never more at once. sleep: waits while the gate is closed, and may end the waiting by an
    exception. limit: at once now. under_way: sent and not answered.
    """

    def __init__(self, most: int, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.most = most
        self._sleep = sleep
        self.limit = float(min(FIRST_LIMIT, most))
        self.under_way = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._open_from_s = 0.0
        self._doubling = True
        self._cut_s = 0.0
        self._best_latency_s = float("inf")
        self._best_rate = 0.0
        self._settling = False
        self._lowered_from_s: float | None = None
        self._start_window()

    @property
    def closed_s(self) -> float:
        """How long the server has asked to wait from now."""
        return max(0.0, self._open_from_s - time.monotonic())

    async def enter(self) -> float:
        """Waits for a place and returns the time of entry, seconds of `time.monotonic`."""
        try:
            while self.closed_s > 0.0 or self.under_way >= int(self.limit):
                if self.closed_s > 0.0:
                    await self._sleep(self.closed_s)
                    continue
                place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(place)
                await place
        except BaseException:
            # Whoever goes without entering hands on the place that it may have been woken for.
            self._wake()
            raise
        self.under_way += 1
        if self.under_way >= int(self.limit):
            self._used_up = True
        return time.monotonic()

    def leave(self) -> None:
        """Gives the place back."""
        self.under_way -= 1
        self._wake()

    def answered(self, entered_s: float) -> None:
        """Learns from a complete answer."""
        self._answers += 1
        self._latency_sum_s += time.monotonic() - entered_s
        if self._answers >= max(self.limit, SHORTEST_WINDOW):
            self._end_window()

    def refused(self, entered_s: float, wait_s: float | None) -> None:
        """Learns from a refusal for rate, or a time-out; `wait_s` is what the server asked for."""
        now = time.monotonic()
        if wait_s is not None:
            self._open_from_s = max(self._open_from_s, now + wait_s)
        # One cut for all that were sent under the old limit.
        if entered_s < self._cut_s:
            return
        self._cut_s = now
        self._doubling = False
        self.limit = max(1.0, self.limit / 2.0)
        self._start_window()

    def _end_window(self) -> None:
        if self._settling:
            # These were answers to what was sent under the old limit.
            self._settling = False
        elif self._used_up:
            self._learn(self._latency_sum_s / self._answers)
        self._start_window()
        self._wake()

    def _learn(self, latency_s: float) -> None:
        # Little's law; a count over a clock would see bursts where a server answers in batches.
        rate = self.limit / latency_s
        if self._lowered_from_s is not None and latency_s > SAME * self._lowered_from_s:
            # Fewer at once did not make it faster, so it was no queue: the judge is this slow.
            self._best_latency_s = latency_s
        self._lowered_from_s = None
        self._best_latency_s = min(latency_s, self._best_latency_s)
        better = DOUBLED_RATE if self._doubling else BETTER_RATE
        if latency_s > QUEUED * self._best_latency_s and rate < better * self._best_rate:
            self._doubling = False
            self._lowered_from_s = latency_s
            self.limit = max(1.0, self.limit * LOWERED)
        else:
            self.limit += self.limit if self._doubling else self.limit**0.5
        self.limit = min(self.limit, float(self.most))
        self._best_rate = max(rate, self._best_rate * FORGOTTEN)
        self._settling = True

    def _start_window(self) -> None:
        self._answers = 0
        self._latency_sum_s = 0.0
        self._used_up = False

    def _wake(self) -> None:
        free = int(self.limit) - self.under_way
        while free > 0 and self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                free -= 1
