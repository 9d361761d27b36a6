"""What a person sees while a command works: a bar, or lines where there is no terminal.

A first Ctrl-C stops the work at its next safe point, a second one at once.
"""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_LINE_SECONDS = 5.0
BAR_WIDTH = 20
# Share, time and the spaces between.
OTHER_WIDTH = 17
Progress = TypeVar("Progress")


@dataclass(frozen=True, slots=True)
class Shown:
    """A progress as it is shown.

    name: of the work, one bar each. done, total: in any unit. detail: text beside the bar.
    in_bytes: show sizes and speed too.
    """

    name: str
    done: float
    total: float
    detail: str
    in_bytes: bool = False


@contextmanager
def shown_progress(
    describe: Callable[[Progress], Shown],
) -> Iterator[Callable[[Progress], None]]:
    """Gives a function that shows progress on stderr, and the package's log with it.

    The function raises KeyboardInterrupt once Ctrl-C was pressed; a second one needs no call.
    """
    from rich.console import Console

    console = Console(stderr=True)
    showing = _bars(console) if console.is_terminal else _plain_lines()
    with showing as show, gentle_interrupt() as interrupted:
        # Only here: what the bar puts in the place of stderr prints above the bar.
        log_to_stderr()

        def report(now: Progress) -> None:
            show(describe(now))
            if interrupted():
                raise KeyboardInterrupt

        yield report


def log_to_stderr() -> None:
    """Shows the package's log on stderr, from INFO on."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("nmoe_data").setLevel(logging.INFO)


@contextmanager
def gentle_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed; a second one interrupts at once."""
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _bars(console: "Console") -> Iterator[Callable[[Shown], None]]:
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import TaskProgressColumn as Share

    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR_WIDTH),
        Share(),
        TimeRemainingColumn(),
    )
    detail = TextColumn("{task.fields[detail]}", markup=False)
    tasks: dict[str, TaskID] = {}
    # Transient: what remains on the screen is the result or the error, one thing.
    with Progress(*columns, detail, console=console, transient=True) as bar:

        def show(now: Shown) -> None:
            if now.name not in tasks:
                for other in tasks.values():
                    bar.update(other, visible=False)
                tasks[now.name] = bar.add_task(now.name, detail="")
            number = bar.task_ids.index(tasks[now.name])
            size = f"{_sizes(now, bar.tasks[number].speed)} " if now.in_bytes else ""
            # Rich would make room for a long line by leaving out the bar.
            room = max(0, console.width - len(now.name) - BAR_WIDTH - OTHER_WIDTH)
            shown = (size + now.detail)[:room]
            bar.update(tasks[now.name], total=now.total, completed=now.done, detail=shown)

        yield show


def _sizes(now: Shown, speed: float | None) -> str:
    from rich.filesize import decimal

    size = f"{decimal(int(now.done))} of {decimal(int(now.total))}"
    return size if speed is None else f"{size}, {decimal(int(speed))}/s"


@contextmanager
def _plain_lines() -> Iterator[Callable[[Shown], None]]:
    printed_s = time.monotonic()

    def show(now: Shown) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= PLAIN_LINE_SECONDS:
            typer.echo(f"{now.done / max(now.total, 1):.0%}  {now.detail}", err=True)
            printed_s = time.monotonic()

    yield show
