"""What an expert-parallel group has moved, dropped and waited for since it was made.

Counts stay on the device until they are asked for. Stages are timed by the host's clock on a CPU
and by pairs of CUDA events on a GPU, which are read once they have passed.

Letters: R ranks.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor

STAGES = ("dispatch", "expert", "combine")
"""The stages of a layer, forward and backward together."""


@dataclass(frozen=True)
class Counters:
    """Sums over all calls; on the device of the group but for `wait_s_R`.

    exchanges: epochs so far. rows_sent_R, bytes_sent_R: int64, rows and their payload (with ids and
    weights) sent to each rank, out and back, none to itself. dropped: int64, assignments that
    reached no expert, not counted again by a replay. overflow: int64, those of them that the
    group's capacity refused. wait_s_R: float64 on the CPU, seconds stood waiting for each rank, in
    the order of ranks, so that one is charged only for being later than those before it. stage_ms:
    milliseconds of each of `STAGES`. exchange_ms, hidden_ms: milliseconds of the exchanges of a
    forward that had other work beside them, and those of them in which that work ran.
    """

    exchanges: int
    rows_sent_R: Tensor
    bytes_sent_R: Tensor
    dropped: Tensor
    overflow: Tensor
    wait_s_R: Tensor
    stage_ms: dict[str, float]
    exchange_ms: float = 0.0
    hidden_ms: float = 0.0

    def since(self, earlier: "Counters") -> "Counters":
        """What came after `earlier`, counters of the same group."""
        times = {name: ms - earlier.stage_ms[name] for name, ms in self.stage_ms.items()}
        numbers = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
            if field.name != "stage_ms"
        }
        return Counters(**numbers, stage_ms=times)


@dataclass(frozen=True)
class Mark:
    """A moment: seconds of the host's clock, or an event in the stream."""

    seconds: float
    event: torch.cuda.Event | None


Interval = tuple[torch.cuda.Event, torch.cuda.Event]
"""When something began and ended on the device."""


@dataclass(frozen=True)
class _Timed:
    """A stage whose events may not have passed yet, and what ran beside it."""

    name: str
    interval: Interval
    beside: Interval | None


class Tally:
    """Adds up what `Counters` shows."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.device = device
        others_R = [0 if peer == rank else 1 for peer in range(ranks)]
        self._others_R = torch.tensor(others_R, device=device)
        self.exchanges = 0
        self.rows_sent_R = torch.zeros(ranks, dtype=torch.int64, device=device)
        self.bytes_sent_R = torch.zeros_like(self.rows_sent_R)
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.overflow = torch.zeros_like(self.dropped)
        self._stage_ms = dict.fromkeys(STAGES, 0.0)
        self._exchange_ms = self._hidden_ms = 0.0
        self._pending: list[_Timed] = []
        self.beside: Interval | None = None
        """When the work ran that what is timed now has beside it; None without such work."""

    def sent(self, rows_R: Tensor, bytes_per_row: int) -> None:
        """Counts an exchange, with its rows to each rank; those that stay here cost nothing."""
        self.exchanges += 1
        others_R = rows_R * self._others_R
        self.rows_sent_R += others_R
        self.bytes_sent_R += others_R * bytes_per_row

    def mark(self) -> Mark:
        """Now, in the current stream of the group's device."""
        if self.device.type != "cuda":
            return Mark(time.perf_counter(), None)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(0.0, event)

    def add_stage(self, name: str, start: Mark) -> None:
        """Charges the time since `start` to a stage. A captured graph is not timed."""
        end = self.mark()
        if start.event is None or end.event is None:
            self._stage_ms[name] += (end.seconds - start.seconds) * 1e3
        elif not torch.cuda.is_current_stream_capturing():
            beside = None if name == "expert" else self.beside
            self._pending.append(_Timed(name, (start.event, end.event), beside))
            self._fold(wait=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charges what runs inside to a stage."""
        start = self.mark()
        yield
        self.add_stage(name, start)

    def snapshot(self, wait_s_R: Tensor) -> Counters:
        """The sums so far, and what the transport waited; waits for stages that still run."""
        self._fold(wait=True)
        return Counters(
            exchanges=self.exchanges,
            rows_sent_R=self.rows_sent_R.clone(),
            bytes_sent_R=self.bytes_sent_R.clone(),
            dropped=self.dropped.clone(),
            overflow=self.overflow.clone(),
            wait_s_R=wait_s_R.clone(),
            stage_ms=dict(self._stage_ms),
            exchange_ms=self._exchange_ms,
            hidden_ms=self._hidden_ms,
        )

    def _fold(self, wait: bool) -> None:
        """Reads the event pairs that have passed, or all of them, waiting."""
        left = []
        for timed in self._pending:
            ends = [timed.interval[1], *([timed.beside[1]] if timed.beside else [])]
            if wait:
                for end in ends:
                    end.synchronize()
            if not all(end.query() for end in ends):
                left.append(timed)
                continue
            start, end = timed.interval
            took_ms = start.elapsed_time(end)
            self._stage_ms[timed.name] += took_ms
            if timed.beside:
                self._exchange_ms += took_ms
                self._hidden_ms += _common_ms(timed.interval, timed.beside)
        self._pending = left


def _common_ms(one: Interval, other: Interval) -> float:
    """Milliseconds for which two intervals of passed events overlap."""
    start = one[0]
    begins = max(0.0, start.elapsed_time(other[0]))
    ends = min(start.elapsed_time(one[1]), start.elapsed_time(other[1]))
    return max(0.0, ends - begins)
