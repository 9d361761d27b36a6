"""A layer over the system calls that change files: a process ends before any one of them.

Reads change nothing, so that a kill beside them is a kill before the next change. A write may also
end half-way, which counts as a point of its own.
"""

import fcntl
import io
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nmoe_train.checkpoint.direct import BLOCK, O_DIRECT

CALLS = ("open", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "close")
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def takes_direct(folder: Path) -> bool:
    """Whether files there can be written past the page cache."""
    descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT)
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | O_DIRECT)
        return os.write(descriptor, mmap.mmap(-1, BLOCK)) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)
        (folder / "probe").unlink()


class DeadlyFiles:
    """From `install` on, this process kills itself at the n-th point; `points` counts them.

    `direct_writes` counts the writes past the page cache. One that ends half-way must end between
    two blocks, as they do on a disk: chunks are to have an even number of them.
    """

    def __init__(self, deadly: int) -> None:
        self.points, self.direct_writes, self._deadly = 0, 0, deadly

    def install(self) -> None:
        """Replaces the functions of `os` and `io`, for good."""
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        real_write, real_open = os.write, io.open

        def write(descriptor: int, data: Any) -> int:
            self._point()
            if self.points + 1 == self._deadly:
                real_write(descriptor, memoryview(data).cast("B")[: len(data) // 2])
            self._point()
            self.direct_writes += bool(O_DIRECT & fcntl.fcntl(descriptor, fcntl.F_GETFL))
            return real_write(descriptor, data)

        def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if set(mode) & set("wax+"):
                self._point()
                found = real_open(file, mode, *arguments, **named)
                return _Raw(found) if named.get("buffering") == 0 else found
            return real_open(file, mode, *arguments, **named)

        os.write, io.open = write, opened

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if real.__name__ != "open" or arguments[1] & CHANGES:
                self._point()
            return real(*arguments, **named)

        return call

    def _point(self) -> None:
        self.points += 1
        if self.points == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)


class _Raw:
    """An unbuffered file, whose writes go through `os.write`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """See io.RawIOBase."""
        return os.write(self._file.fileno(), data)

    def fileno(self) -> int:
        """See io.RawIOBase."""
        number: int = self._file.fileno()
        return number

    def __enter__(self) -> "_Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
