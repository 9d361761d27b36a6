"""Reads a growing file of lines piece by piece.

Only whole lines are taken, so a line that is being written waits for its end; each call gives only
what was added since the last one. Whether the file is still the one that was read is told by its
content, as the number of a deleted file's inode is given to new files: the first bytes, and those
before the place to go on from, must be as they were. A line longer than `LONGEST_LINE_BYTES` is
passed over and counted: to wait for its end would mean to read it again each time.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nviz.store.plain import open_plain

CHUNK_BYTES = 4 * 2**20
LONGEST_LINE_BYTES = 16 * 2**20
MARK_BYTES = 4096


class GrowingLines:
    """A file of lines that may grow, be replaced or vanish between calls.

    `skipped` counts lines that were too long; the caller adds those that it could not use. It
    starts again with a replaced file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._offset = 0
        # The first bytes of the file, and the last ones before the offset.
        self._head = b""
        self._tail = b""
        self._gave_lines = False
        self._too_long = False

    @property
    def is_empty(self) -> bool:
        """Whether the file, as it now is, gave no line: nothing was read since it was replaced."""
        return not self._gave_lines

    def new_blocks(self) -> Iterator[bytes]:
        """Blocks of whole lines added since the last call, each ending in a newline.

        A replaced file starts again; one that is gone gives nothing. Raises OSError if the file
        cannot be read, or is no plain file.
        """
        return (data for _, data in self.new_blocks_from())

    def new_blocks_from(self) -> Iterator[tuple[bool, bytes]]:
        """Like `new_blocks`, each block with whether it is the first of its file."""
        try:
            file = open_plain(self.path)
        except FileNotFoundError:
            return
        with file:
            self._go_on_or_restart(file)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                data = rest + chunk
                end = data.rfind(b"\n") + 1
                if not end and (self._too_long or len(data) > LONGEST_LINE_BYTES):
                    self._too_long, end = True, len(data)
                rest = data[end:]
                if lines := self._taken(data[:end]):
                    first, self._gave_lines = not self._gave_lines, True
                    yield first, lines

    def _taken(self, data: bytes) -> bytes:
        """Goes on behind `data`, the next bytes of the file; the whole lines in it that count."""
        self._offset += len(data)
        self._head = self._head or data[:MARK_BYTES]
        self._tail = data[-MARK_BYTES:] if data else self._tail
        if not self._too_long:
            return data
        end = data.find(b"\n") + 1
        if not end:
            return b""
        self._too_long = False
        self.skipped += 1
        return data[end:]

    def _go_on_or_restart(self, file: BinaryIO) -> None:
        """Puts `file` where reading goes on, or at its start if what was read is not there."""
        head = file.read(len(self._head))
        file.seek(self._offset - len(self._tail))
        if head != self._head or file.read(len(self._tail)) != self._tail:
            self._offset = self.skipped = 0
            self._head = self._tail = b""
            self._gave_lines = self._too_long = False
            file.seek(0)


def last_lines(path: Path, most_bytes: int) -> tuple[bytes, bool]:
    """The whole lines in the last `most_bytes` of a plain file, and whether others come before.

    Raises OSError as `open_plain` does.
    """
    with open_plain(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most_bytes))
        data = file.read(most_bytes)
    first = data.find(b"\n") + 1 if size > most_bytes else 0
    return data[first : data.rfind(b"\n") + 1], size > most_bytes
