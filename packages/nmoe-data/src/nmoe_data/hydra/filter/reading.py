"""The records of one chunk, read by whichever worker has it.

A plain file is entered at the first line that begins in the chunk. In a compressed or a Parquet
file that is dear; so a worker keeps its reader open from chunk to chunk and passes over the records
of others. A compressed file is entered at the latest line start that the coordinator knows. Each
worker thus reads the whole of a large compressed or Parquet file: cheap beside an encoder, but
plain JSONL, or many files, spread over many workers better.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nmoe_data.hydra.filter.plan import COMPRESSED, PLAIN, Chunk
from nmoe_data.sources import PAST_ALL, Record, SourceFile, read_records


@dataclass(slots=True)
class _Open:
    """A file being read: the records to come, and the first of them if it was already taken."""

    file: int
    position: int
    records: Iterator[Record]
    fresh: bool = True
    waiting: Record | None = None

    def take(self) -> Record | None:
        record, self.waiting = self.waiting or next(self.records, None), None
        if record is not None:
            self.position = record.position
        return record


class ChunkReader:
    """Reads chunks in any order; the fastest where a later chunk of the same file follows.

    After the records of a chunk were taken, `position` is where the next record begins (PAST_ALL
    after the last of the file) and `consumed` the bytes of the file on disk that were used.
    """

    def __init__(self, files: Sequence[SourceFile], text_field: str) -> None:
        self._files = files
        self._text_field = text_field
        self._held: _Open | None = None
        self.position = 0
        self.consumed = 0

    def read(self, chunk: Chunk, known: int = 0) -> Iterator[tuple[int, Record]]:
        """Yields the chunk's records with the number of their file.

        known: the start of a record that is not behind the chunk's start, for compressed files.
        Records that cannot be read come as rejections; nothing raises for the sake of a file.
        """
        self.position = PAST_ALL
        if chunk.stop is None and chunk.index == 0:
            for number in range(chunk.first, chunk.last):
                yield from ((number, record) for record in self._records(number, 0))
            return
        begin = self._begin(chunk, known)
        if begin is not None:
            yield from ((chunk.first, record) for record in self._part(chunk, begin))

    def _part(self, chunk: Chunk, begin: int) -> Iterator[Record]:
        held = self._enter(chunk, begin)
        while (record := held.take()) is not None:
            if chunk.stop is not None and record.position >= chunk.stop:
                held.waiting, held.fresh = record, False
                self.position = record.position
                return
            self.consumed = record.consumed
            if record.position >= chunk.start:
                yield record
            elif record.next_position == PAST_ALL and not held.fresh:
                # Damage in what is passed over must not hide a chunk that can be read by itself.
                held = self._open(chunk.first, begin)
        self._held = None

    def _begin(self, chunk: Chunk, known: int) -> int | None:
        """Returns where to enter the chunk's file, None if no record begins in the chunk."""
        name = self._files[chunk.first].path.name.lower()
        if name.endswith(PLAIN):
            return self._first_line(chunk)
        return known if name.endswith(COMPRESSED) else chunk.start

    def _enter(self, chunk: Chunk, begin: int) -> _Open:
        held = self._held
        plain = self._files[chunk.first].path.name.lower().endswith(PLAIN)
        earliest = begin if plain else 0
        if held is None or held.file != chunk.first:
            return self._open(chunk.first, begin)
        if not earliest <= held.position <= max(begin, chunk.start):
            return self._open(chunk.first, begin)
        return held

    def _open(self, number: int, position: int) -> _Open:
        self._held = _Open(number, position, self._records(number, position))
        return self._held

    def _records(self, number: int, position: int) -> Iterator[Record]:
        return read_records(self._files[number], position, self._text_field)

    def _first_line(self, chunk: Chunk) -> int | None:
        """Returns where the first line that begins in the chunk does.

        The search ends with the chunk, so that one line over many chunks is not read in each.
        """
        if chunk.start == 0:
            return 0
        path = self._files[chunk.first].path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
                stop = len(view) if chunk.stop is None else chunk.stop
                found = view.find(b"\n", chunk.start - 1, stop - 1)
                return None if found < 0 or found + 1 >= len(view) else found + 1
        except (OSError, ValueError):
            # Gone or cut meanwhile: the reader says why.
            return chunk.start
