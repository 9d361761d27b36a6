"""`dropped.jsonl`: a random sample of what was dropped, the same for any number of workers.

Every document has a key, a hash of the seed and of where it stands; the sample is those with the
smallest keys. So chunks may come again after a kill, or in any order, and change nothing.
"""

from collections.abc import Iterable
from pathlib import Path

import orjson

from nmoe_data.files import atomic_write
from nmoe_data.hydra.filter.row import Row

# Above every key: the sample is not full.
NO_LIMIT = 1 << 64


class Sample:
    """The `size` smallest keys and their lines; begins with what `path` holds."""

    def __init__(self, path: Path, size: int, seed: int) -> None:
        self._path = path
        self._size = size
        self._lines: dict[int, bytes] = {}
        if path.is_file():
            self.add((_key(line, seed), line) for line in path.read_bytes().splitlines(True))

    @property
    def below(self) -> int:
        """Only smaller keys can still come in."""
        if len(self._lines) < self._size:
            return NO_LIMIT
        return max(self._lines, default=0)

    def add(self, dropped: Iterable[tuple[int, bytes]]) -> None:
        """Takes (key, line) of dropped documents into account."""
        self._lines.update(dropped)
        for key in sorted(self._lines)[self._size :]:
            del self._lines[key]

    def write(self) -> None:
        """Writes the file atomically, by key."""
        atomic_write(self._path, b"".join(self._lines[key] for key in sorted(self._lines)))


def _key(line: bytes, seed: int) -> int:
    row = orjson.loads(line)
    del row["cut"]
    return Row(**row).sample_key(seed)
