"""Writing and reading past the page cache, where the file system takes it (O_DIRECT).

A checkpoint is written once and hardly read: through the page cache it would push out what is used,
cost the CPU a copy, and be read back from memory, which says nothing of the disk. Direct transfers
need an aligned buffer, place and length, so the last part of a file goes the usual way. A file
system that refuses is told once.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

BLOCK = 4096
"""Alignment that all common disks take."""
O_DIRECT: int = getattr(os, "O_DIRECT", 0)

log = logging.getLogger(__name__)
_refused: set[int] = set()
"""Devices whose file systems take no direct transfers."""


class DirectWriter:
    """A new file that is written from start to end in chunks of `chunk_bytes`, but for the last.

    Raises OSError, as `write` and `sync` do, also where there is such a file.
    """

    def __init__(self, path: Path, chunk_bytes: int, size: int) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        direct = chunk_bytes % BLOCK == 0 and size >= chunk_bytes
        self._direct = direct and _turn(self._descriptor, path, on=True)
        self._buffer = mmap.mmap(-1, chunk_bytes) if self._direct else None

    def write(self, chunk: memoryview) -> None:
        """Writes the next chunk; only the last may be shorter."""
        if self._buffer is not None and len(chunk) < len(self._buffer):
            self._turn_off()
        if self._buffer is None:
            self._write_all(chunk)
            return
        self._buffer[:] = chunk
        with memoryview(self._buffer) as aligned:
            self._write_all(aligned)

    def sync(self) -> None:
        """Makes the file durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)
        # An error on its way may still look at the buffer, which cannot be closed then.
        self._buffer = None

    def _write_all(self, data: memoryview) -> None:
        size = len(data)
        try:
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except OSError as error:
                    # Some take the flag and refuse the transfer; some write a part of a block.
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    if len(data) == size:
                        _tell_refused(self._descriptor, self._path)
                    self._turn_off()
        except OSError as error:
            error.filename = str(self._path)
            raise

    def _turn_off(self) -> None:
        self._direct = False
        _turn(self._descriptor, self._path, on=False)
        self._buffer = None


def sha256_from_disk(path: Path, chunk_bytes: int) -> str:
    """SHA-256 of a file's bytes, read past the page cache where that can be. Raises OSError."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        direct = chunk_bytes % BLOCK == 0 and size >= chunk_bytes
        direct = direct and _turn(descriptor, path, on=True)
        with ThreadPoolExecutor(1, "hash") as beside:
            # One is read into while the other is hashed.
            views = [memoryview(mmap.mmap(-1, max(chunk_bytes, BLOCK))) for _ in range(2)]
            hashed: Future[None] | None = None
            # The end of a file is shorter than a block, which a direct read may refuse.
            whole = size - size % chunk_bytes if direct else 0
            for view in itertools.cycle(views):
                try:
                    read = os.readv(descriptor, [view])
                except OSError as error:
                    # After a short read, the next one begins within a block.
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    read, whole = 0, 0
                else:
                    if not read:
                        break
                    if hashed is not None:
                        hashed.result()
                    hashed = beside.submit(digest.update, view[:read])
                    whole -= read
                if direct and whole <= 0:
                    direct = False
                    _turn(descriptor, path, on=False)
            if hashed is not None:
                hashed.result()
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _turn(descriptor: int, path: Path, *, on: bool) -> bool:
    """Turns direct transfers on or off; whether they are as asked."""
    if not O_DIRECT or (on and os.fstat(descriptor).st_dev in _refused):
        return not on
    flags: Any = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)
    except OSError:
        _tell_refused(descriptor, path)
        return False
    return True


def _tell_refused(descriptor: int, path: Path) -> None:
    """Says once for a device that its files are written through the page cache."""
    with contextlib.suppress(OSError):
        device = os.fstat(descriptor).st_dev
        if device not in _refused:
            _refused.add(device)
            log.warning(
                "the file system of %s takes no direct transfers (O_DIRECT): checkpoints go "
                "through the page cache",
                path.parent,
            )
