"""Time spent in the stages of a step: on the GPU by CUDA events, elsewhere by the host's clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StageTimer:
    """Adds up the time of named stages; `milliseconds` reads and clears them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host_s: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times what runs inside; a stage may be entered several times in a step."""
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            start_s = time.perf_counter()
            yield
            self._host_s[name] = self._host_s.get(name, 0.0) + time.perf_counter() - start_s

    def milliseconds(self) -> dict[str, float]:
        """Time of each stage since the last call, as `time_ms/<stage>`; waits for the GPU."""
        totals = {name: seconds * 1e3 for name, seconds in self._host_s.items()}
        if self._events:
            self._events[-1][2].synchronize()
        for name, start, end in self._events:
            totals[name] = totals.get(name, 0.0) + start.elapsed_time(end)
        self._host_s, self._events = {}, []
        return {f"time_ms/{name}": total for name, total in totals.items()}
