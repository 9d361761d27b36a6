"""SIGINT and SIGTERM of a run: they stop it at once, or after the step that is being made.

While steps are made, the first signal is only noted, and the loop saves and leaves; a second one
stops at once. Anywhere else a signal raises KeyboardInterrupt, which the making of shards takes as
its word to save and leave too.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether somebody asked the run to stop; use as a context manager around all of it."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._on_note: Callable[[str], None] | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # it came from signal.signal

    @contextmanager
    def noted(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Inside, the first signal is noted in `signal` and told; the code there looks at it."""
        before, self._on_note = self._on_note, tell
        try:
            yield
        finally:
            self._on_note = before

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        first = self.signal is None
        self.signal = signal.Signals(number)
        if not first or self._on_note is None:
            raise KeyboardInterrupt(self.signal.name)
        self._on_note(f"{self.signal.name}: finishing this step, then saving")


def signal_of(stop: KeyboardInterrupt) -> signal.Signals:
    """The signal that an `Interrupt` raised this for; SIGINT where none says otherwise."""
    return signal.Signals[stop.args[0]] if stop.args else signal.SIGINT
