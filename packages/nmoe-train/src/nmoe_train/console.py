"""What a person sees while a run goes on: a progress bar, or lines where there is no terminal."""

import time
from typing import Any

from nmoe_data.prep import PrepProgress
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from nmoe_train.loop import Observer

LINE_EVERY_S = 5.0


class ConsoleObserver(Observer):
    """Shows how far the data and the training are; use as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._printed_s = time.monotonic()

    def __enter__(self) -> "ConsoleObserver":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def message(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def preparation(self, state: PrepProgress) -> None:
        """Shows the making of token shards."""
        detail = f"{state.tokens:,} tokens"
        self._show("token shards", state.bytes_done, state.bytes_total, detail)
        if self._line_is_due(last=state.bytes_done >= state.bytes_total):
            share = state.bytes_done / max(1, state.bytes_total)
            self.message(f"token shards {share:.0%}  {detail}")

    def begin(self, step: int, steps: int) -> None:
        """Shows the bar of the training."""
        self._steps = steps
        self._show("training", step, steps, "")

    def step(self, record: dict[str, Any]) -> None:
        """Moves the bar, or prints a line if there is no terminal."""
        done = record["step"]
        detail = f"loss {record['loss/ce']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        self._show("training", done, self._steps, detail)
        if self._line_is_due(last=done == self._steps):
            left_s = (self._steps - done) * record["step_ms"] / 1e3
            self.message(f"step {done}/{self._steps}  {detail}  {left_s:.0f} s left")

    def _show(self, description: str, done: float, total: float, detail: str) -> None:
        """Moves the bar of this description, which is opened at its first mention."""
        known = (task.id for task in self._progress.tasks if task.description == description)
        task = next(known, None)
        if task is None:
            task = self._progress.add_task(description, total=total, detail=detail)
        self._progress.update(task, completed=done, total=total, detail=detail)

    def _line_is_due(self, *, last: bool) -> bool:
        """Whether a line stands in for the bar now: without a terminal, every few seconds."""
        due = last or time.monotonic() - self._printed_s > LINE_EVERY_S
        if self.console.is_terminal or not due:
            return False
        self._printed_s = time.monotonic()
        return True
