"""Reads a growing file of lines piece by piece.

Only whole lines are taken, so a line that is being written waits for its end; each call gives only
what was added since the last one.
"""

import os
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 4 * 2**20


class GrowingLines:
    """A file of lines that may grow, be replaced or vanish between calls.

    `skipped` is for the caller, to count lines it could not use; it starts again with a replaced
    file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._offset = 0
        self._inode = 0

    def new_blocks(self) -> Iterator[bytes]:
        """Blocks of whole lines added since the last call, each ending in a newline.

        A replaced file starts again; one that is gone gives nothing. Raises OSError if the file
        cannot be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            self._restart_if_replaced(file.fileno())
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(CHUNK_BYTES):
                data = rest + chunk
                end = data.rfind(b"\n") + 1
                self._offset += end
                if end:
                    yield data[:end]
                rest = data[end:]

    def _restart_if_replaced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset, self.skipped = found.st_ino, 0, 0
