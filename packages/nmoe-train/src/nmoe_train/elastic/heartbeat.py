"""A worker's heartbeat: a thread that says it lives, and hears what the coordinator wants.

Its beats go on while the main thread waits in a collective or for a disk, and stop when the process
does. It is also what ends those waits: once a generation has ended it cuts the connections over
which the main thread waits for others.

A worker that was stopped for a while may wake up when the others have gone on without it. Until the
thread has asked, nothing tells; so the right to act for the generation is a lease, which every beat
that got through renews for the deadline after which a silent worker is counted out.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from nmoe_train.elastic.link import CALL_S, Beat, Control, Line, StoreGone
from nmoe_train.errors import TrainError


class Left(Exception):
    """This worker is not, or no longer, part of the run; it must leave and may come back as new."""


class Heart(threading.Thread):
    """Beats for worker `number` every `beat_s` seconds until `stop`."""

    def __init__(self, address: str, number: int, beat_s: float, deadline_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._line, self.number = Line(address, max(CALL_S, deadline_s)), number
        self._beat_s, self._deadline_s = beat_s, deadline_s
        self.control = Control()
        self._at = Beat()
        self._gone: str | None = None
        self._generation = 0
        self._cut: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._beats = 0
        self._renewed_s = time.monotonic()
        self._beat()

    def run(self) -> None:
        """Beats; ends when asked to, or when the store is gone."""
        while not self._stopped.wait(self._beat_s):
            try:
                self._beat()
            except StoreGone as error:
                self._gone = str(error)
            except Exception as error:  # without a heartbeat the others count this one as dead
                self._gone = f"the heartbeat failed: {error!r}"
            self._cut_if_ended()
            if self._gone is not None:
                return

    def _beat(self) -> None:
        self._beats += 1
        begun_s = time.monotonic()
        beat = replace(self._at, count=self._beats)
        self._line.write(f"beat/{self.number}", beat.encode())
        self.control = self._line.control()
        self._renewed_s = begun_s

    def stop(self) -> None:
        """Ends the beats, which says nothing to anyone."""
        self._stopped.set()

    def enter(self, generation: int, cut: Callable[[], None]) -> None:
        """From now on `cut` is called once this generation has ended."""
        with self._lock:
            self._generation, self._cut = generation, cut
        self._at = replace(self._at, generation=generation, step=0)

    def finished(self, step: int) -> None:
        """This worker has finished a step of its generation; the next beat says so."""
        furthest = max(step, self._at.furthest)
        self._at = replace(self._at, step=step, furthest=furthest)

    @property
    def step(self) -> int:
        """The last step that it has finished in its generation, 0 before the first."""
        return self._at.step

    def leave(self) -> None:
        """Whatever was to be cut is closed."""
        with self._lock:
            self._cut = None

    def _cut_if_ended(self) -> None:
        if not self.ended():
            return
        with self._lock:
            cut, self._cut = self._cut, None
            if cut is not None:
                cut()

    def ended(self) -> bool:
        """Whether the generation that was entered last goes on without this worker, or not."""
        return (
            self._gone is not None
            or self.number in self.control.lost
            or self.control.stop >= self._generation
        )

    def resizing(self) -> bool:
        """Whether the generation should be left at the next step boundary."""
        return self.control.resize >= self._generation

    def check(self) -> None:
        """Raises Left where this worker is counted out, or nobody knows whether it is."""
        if self._gone is not None:
            raise Left(self._gone)
        if self.number in self.control.lost:
            raise Left("the others went on without this worker")

    def guard(self) -> None:
        """Before this worker acts for its generation: raises TrainError unless it still may."""
        silent_s = time.monotonic() - self._renewed_s
        if silent_s < self._deadline_s and not self.ended():
            return
        why = f"after {silent_s:.1f} s without a sign of life " if not self.ended() else ""
        raise TrainError(
            "E-PEER",
            f"worker {self.number} may not act for its generation {why}any more",
            "it joins again by itself",
        )
