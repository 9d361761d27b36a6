"""What the training loop asks of an elastic run, and tells it: one object per generation."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nmoe_train.elastic.heartbeat import Heart
from nmoe_train.elastic.membership import Generation
from nmoe_train.elastic.snapshot import Memory
from nmoe_train.interrupt import Interrupt

RESIZED = "resized"
"""Outcome of an attempt that made room for a worker; the next generation goes on from there."""


@dataclass
class Session:
    """This worker's part in one generation."""

    generation: Generation
    heart: Heart
    memory: Memory
    interrupt: Interrupt
    recoverable: Callable[[BaseException], bool]
    """Whether an error means that others are gone, so that those left will go on."""
    began_s: float = field(default_factory=time.monotonic)

    def opening_events(self, step: int) -> list[dict[str, Any]]:
        """What led to this generation, as events of the run folder."""
        faults = [
            {
                "event": "fault",
                "time_unix_s": fault.time_unix_s,
                "step": fault.step,
                "what": fault.what,
                "rank": fault.rank,
                "host": fault.host,
                "worker": fault.worker,
                "detected_s": fault.detected_s,
            }
            for fault in self.generation.faults
        ]
        joins = [
            {
                "event": "join",
                "step": step,
                "what": f"rank {rank} on {worker.host} takes part",
                "rank": rank,
                "host": worker.host,
                "worker": worker.number,
            }
            for rank, worker in enumerate(self.generation.members)
            if worker.number in self.generation.joined and self.generation.number > 1
        ]
        return faults + joins

    def recovery(self, from_step: int, source: str) -> dict[str, Any] | None:
        """The event once the first step is made; None where nothing was lost before.

        source: where the state came from, "memory" or "disk".
        """
        generation = self.generation
        if not generation.faults:
            return None
        return {
            "step": from_step,
            "steps_lost": max(0, generation.step_before - from_step),
            "ranks": len(generation.members),
            "layout_before": generation.sizes_before,
            "layout": generation.sizes,
            "from": source,
        }

    def seconds_since_fault(self) -> float:
        """Since the last sign of life of the first that was lost."""
        return self.generation.fault_age_s + time.monotonic() - self.began_s
