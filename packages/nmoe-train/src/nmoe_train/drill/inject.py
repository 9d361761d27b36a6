"""Faults from outside, each at its moment, and what was done to whom."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nmoe_train.drill.orders import order
from nmoe_train.drill.plan import Plan, PlannedFault
from nmoe_train.elastic.coordinator import Coordinator
from nmoe_train.elastic.launcher import Launcher

STOPPED_FOR = 1.6
"""A stopped worker is continued after that many deadlines: long after the others went on."""
SPLIT_S = 4.0
SLOW_DISK_S = 3.0
SLOW_STEPS = 5


@dataclass(frozen=True)
class Injected:
    """A fault that was done: to which workers (slots and numbers), when, and after which step."""

    fault: PlannedFault
    slots: tuple[int, ...]
    workers: tuple[int, ...]
    unix_s: float
    step: int


class Injector:
    """Does what a plan says while a launcher runs: call `poll` often."""

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        orders: Path,
        workers: int,
        deadline_s: float,
        tell: Callable[[str], None],
    ) -> None:
        assert launcher.coordinator is not None
        self._launcher, self._coordinator = launcher, launcher.coordinator
        self._orders, self._workers, self._deadline_s = orders, workers, deadline_s
        self._tell = tell
        self._left = list(plan.faults)
        self._due_s: float | None = None
        self._not_before = 0
        self._continue: list[tuple[float, int]] = []
        self._dying: set[int] = set()
        self.done: list[Injected] = []

    def poll(self) -> None:
        """Does what is due."""
        now_s = time.monotonic()
        for due_s, pid in [item for item in self._continue if item[0] <= now_s]:
            self._continue.remove((due_s, pid))
            _signal(pid, signal.SIGCONT)
        if not self._left or self._coordinator.step < max(self._left[0].step, self._not_before):
            return
        if self._due_s is None:
            self._due_s = now_s + self._left[0].delay_s
        if now_s >= self._due_s and (targets := self._targets(self._left[0])):
            self._due_s = None
            self._inject(self._left.pop(0), targets)

    def _targets(self, fault: PlannedFault) -> tuple[int, ...]:
        """The slots to hit: as planned, or those after them where no member lives there now."""
        members, running = _member_slots(self._coordinator), self._launcher.processes()
        fit = {place[1] for place, pid in running.items() if pid not in self._dying}
        alive = sorted(members & fit)
        wanted = [slot for slot in fault.slots if slot in alive]
        others = [slot for slot in alive if slot not in wanted]
        most = max(1, len(alive) // 2) if fault.kind == "partition" else 1
        return tuple(sorted((wanted or others)[:most]))

    def _inject(self, fault: PlannedFault, slots: Sequence[int]) -> None:
        pids = {place[1]: pid for place, pid in self._launcher.processes().items()}
        numbers = _numbers(self._coordinator)
        injected = Injected(
            fault,
            tuple(slots),
            tuple(numbers[slot] for slot in slots if slot in numbers),
            time.time(),
            self._coordinator.step,
        )
        self.done.append(injected)
        number = len(self.done)
        self._tell(f"step {injected.step}: {fault.kind} {_named(slots)}")
        if fault.kind in ("kill", "stop", "partition"):
            # Nothing more is done to a process that is to be lost already.
            self._dying |= {pids[slot] for slot in slots}
        if fault.kind == "kill":
            _signal(pids[slots[0]], signal.SIGKILL)
        elif fault.kind == "stop":
            _signal(pids[slots[0]], signal.SIGSTOP)
            until_s = time.monotonic() + STOPPED_FOR * self._deadline_s
            self._continue.append((until_s, pids[slots[0]]))
        elif fault.kind == "slow-peer":
            order(self._orders, slots[0], number, kind="slow-peer", steps=SLOW_STEPS)
            # A generation that ended now would forget who was slow before it is named.
            self._not_before = injected.step + SLOW_STEPS + 2
        elif fault.kind in ("slow-disk", "full-disk"):
            order(self._orders, slots[0], number, kind=fault.kind, seconds=SLOW_DISK_S)
        else:
            split = {"small": list(slots), "cuts_store": fault.cuts_store}
            split |= {"workers": self._workers, "heals_unix_s": time.time() + SPLIT_S}
            for slot in range(self._workers):
                order(self._orders, slot, number, kind="partition", **split)


def _member_slots(coordinator: Coordinator) -> set[int]:
    """Slots of the members of the newest generation that are not lost."""
    members = () if coordinator.generation is None else coordinator.generation.members
    lost = coordinator.control.lost
    return {worker.place[1] for worker in members if worker.number not in lost}


def _numbers(coordinator: Coordinator) -> dict[int, int]:
    members = () if coordinator.generation is None else coordinator.generation.members
    return {worker.place[1]: worker.number for worker in members}


def _named(slots: Sequence[int]) -> str:
    return ("worker " if len(slots) == 1 else "workers ") + ", ".join(map(str, slots))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
