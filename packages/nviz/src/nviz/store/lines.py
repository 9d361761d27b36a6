"""Reads a growing file of lines piece by piece.

Only whole lines are taken, so a line that is being written waits for its end; each call gives only
what was added since the last one. Whether the file is still the one that was read is told by its
content, as the number of a deleted file's inode is given to new files: the first bytes, and those
before the place to go on from, must be as they were.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 4 * 2**20
MARK_BYTES = 4096


class GrowingLines:
    """A file of lines that may grow, be replaced or vanish between calls.

    `skipped` is for the caller, to count lines it could not use; it starts again with a replaced
    file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._offset = 0
        self._head = b""
        self._tail = b""

    @property
    def is_empty(self) -> bool:
        """Whether the file, as it now is, gave no line: nothing was read since it was replaced."""
        return self._offset == 0

    def new_blocks(self) -> Iterator[bytes]:
        """Blocks of whole lines added since the last call, each ending in a newline.

        A replaced file starts again; one that is gone gives nothing. Raises OSError if the file
        cannot be read.
        """
        return (data for _, data in self.new_blocks_from())

    def new_blocks_from(self) -> Iterator[tuple[bool, bytes]]:
        """Like `new_blocks`, each block with whether it is the first of its file."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._go_on_or_restart(file)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                data = rest + chunk
                end = data.rfind(b"\n") + 1
                if end:
                    first = self._offset == 0
                    self._offset += end
                    self._head = self._head or data[: min(end, MARK_BYTES)]
                    self._tail = data[max(0, end - MARK_BYTES) : end]
                    yield first, data[:end]
                rest = data[end:]

    def _go_on_or_restart(self, file: BinaryIO) -> None:
        """Puts `file` where reading goes on, or at its start if what was read is not there."""
        head = file.read(len(self._head))
        file.seek(self._offset - len(self._tail))
        if head != self._head or file.read(len(self._tail)) != self._tail:
            self._offset = self.skipped = 0
            self._head = self._tail = b""
            file.seek(0)
