"""Which chunk is handed out next, and which is next in the order of the documents.

Chunks are handed out in order, and done in any. The frontier is the first chunk that has not come
back; what came back before it can be written. Of an open unit chunks are handed out a little beyond
the frontier until one meets the end of the file; those beyond that one count for nothing.
"""

from collections import deque
from collections.abc import Sequence

from nmoe_data.hydra.filter.plan import Chunk, Unit, chunk_at
from nmoe_data.hydra.filter.work import Done
from nmoe_data.sources import PAST_ALL

AHEAD = 64
KNOWN_STARTS = 64


class Schedule:
    """The chunks of `units` from chunk `index` of unit `unit` on.

    known: where a record begins in that unit's file, not behind that chunk. workers: how many of an
    open unit are handed out beyond the frontier, twice.
    """

    def __init__(
        self, units: Sequence[Unit], unit: int, index: int, known: int, workers: int
    ) -> None:
        self._units = units
        self._next = (unit, index)
        self._frontier = (unit, index)
        self._ahead = max(AHEAD, 4 * workers)
        self._ahead_open = 2 * workers
        self._known: deque[int] = deque([known], maxlen=KNOWN_STARTS)
        self._last: dict[int, int] = {}
        self._done: dict[tuple[int, int], Done] = {}
        self._out = 0

    @property
    def finished(self) -> bool:
        """Whether the frontier is behind the last chunk."""
        return self._frontier[0] >= len(self._units)

    @property
    def place(self) -> tuple[int, int, int]:
        """The frontier's unit and index, and the last known start of a record in its file."""
        return *self._frontier, self._known[-1]

    def hand_out(self) -> Chunk | None:
        """Returns the next chunk to do, None while enough are out or all are."""
        self._skip_ended()
        unit, index = self._next
        if unit >= len(self._units) or self._out + len(self._done) >= self._ahead:
            return None
        if self._units[unit].chunks is None and unit not in self._last:
            begun = self._frontier[1] if self._frontier[0] == unit else 0
            if index - begun >= self._ahead_open:
                return None
        self._next = (unit, index + 1)
        self._out += 1
        return chunk_at(self._units[unit], index)

    def known_start(self, chunk: Chunk) -> int:
        """Returns where a record begins in the chunk's file, as near before the chunk as known."""
        if chunk.unit != self._frontier[0]:
            return 0
        return max((start for start in self._known if start <= chunk.start), default=0)

    def came_back(self, done: Done) -> None:
        """Takes a chunk that is done."""
        self._out -= 1
        unit, index = done.chunk.unit, done.chunk.index
        if self._units[unit].chunks is None and done.position == PAST_ALL:
            self._last[unit] = min(index, self._last.get(unit, index))
        self._done[unit, index] = done

    def advance(self) -> Done | None:
        """Returns the frontier's chunk and moves on, None if it has not come back."""
        done = self._done.pop(self._frontier, None)
        if done is None:
            return None
        unit, index = self._frontier
        if index + 1 < self._count(unit):
            self._frontier = (unit, index + 1)
            self._known.append(done.position)
        else:
            self._frontier = (unit + 1, 0)
            self._known = deque([0], maxlen=KNOWN_STARTS)
        return done

    def past_the_end(self) -> list[Done]:
        """Returns, once, the chunks done that lie beyond the end of their file."""
        beyond = [key for key in self._done if key < self._frontier]
        return [self._done.pop(key) for key in beyond]

    def _count(self, unit: int) -> float:
        chunks = self._units[unit].chunks
        if chunks is not None:
            return chunks
        return self._last[unit] + 1 if unit in self._last else float("inf")

    def _skip_ended(self) -> None:
        unit, index = self._next
        if unit < len(self._units) and index >= self._count(unit):
            self._next = (unit + 1, 0)
