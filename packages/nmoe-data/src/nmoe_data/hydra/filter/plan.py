"""How a corpus is cut into chunks: the unit of work, of order and of resume.

A unit is either a few whole small files, or one large file in steps: bytes of a plain JSONL file,
rows of a Parquet file, bytes after decompression of a compressed JSONL file. A chunk is one step of
a unit and holds the records that begin in it. Where chunks lie follows from the names and sizes of
the files alone, never from the number of workers. How many steps a compressed file has is known
only when its end is read; such a unit is open, and whoever reads past its end says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nmoe_data.sources import SourceFile

# About 250 web pages: the work that a kill can lose.
CHUNK_BYTES = 1 << 20
UNIT_FILES = 256
PARQUET_ROWS = 8192
COMPRESSED_RATIO = 4
PLAIN, COMPRESSED = (".jsonl", ".ndjson"), (".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True, slots=True)
class Unit:
    """Files `first` to before `last` of the listing, in `chunks` steps of `step` positions.

    chunks: None while only reading can tell. size: bytes on disk.
    """

    number: int
    first: int
    last: int
    step: int
    chunks: int | None
    size: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of files `first` to before `last` whose position is in `start` to before `stop`.

    stop: None for all that follow. Chunks are read in the order of (unit, index).
    """

    unit: int
    index: int
    first: int
    last: int
    start: int
    stop: int | None

    @property
    def name(self) -> str:
        """A name that sorts in the order of reading."""
        return f"{self.unit:08d}-{self.index:08d}"


def plan_units(files: Sequence[SourceFile]) -> list[Unit]:
    """Returns the units of all files, in the order of the listing.

    Footers of Parquet files are read for their number of rows; one that cannot be read is one
    chunk, whose reader then rejects it.
    """
    units: list[Unit] = []
    small: list[int] = []
    for number, file in enumerate(files):
        step, chunks = _steps(file)
        if chunks != 1:
            _close(units, small, files)
            units.append(Unit(len(units), number, number + 1, step, chunks, file.size))
            continue
        small.append(number)
        if len(small) >= UNIT_FILES or sum(files[n].size for n in small) >= CHUNK_BYTES:
            _close(units, small, files)
    _close(units, small, files)
    return units


def _close(units: list[Unit], small: list[int], files: Sequence[SourceFile]) -> None:
    if small:
        size = sum(files[number].size for number in small)
        units.append(Unit(len(units), small[0], small[-1] + 1, 0, 1, size))
        small.clear()


def _steps(file: SourceFile) -> tuple[int, int | None]:
    """Returns the length of a step in the file's positions, and how many steps it has."""
    name = file.path.name.lower()
    if name.endswith(PLAIN):
        return CHUNK_BYTES, max(1, -(-file.size // CHUNK_BYTES))
    if name.endswith(COMPRESSED) and file.size * COMPRESSED_RATIO > CHUNK_BYTES:
        return CHUNK_BYTES, None
    if name.endswith(".parquet"):
        return _row_steps(file)
    return 0, 1


def _row_steps(file: SourceFile) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as opened:
            metadata = opened.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError):
        return 0, 1
    rows = sum(group.num_rows for group in groups)
    size = max(1, sum(group.total_byte_size for group in groups))
    step = max(1, min(PARQUET_ROWS, CHUNK_BYTES * rows // size))
    return step, max(1, -(-rows // step))


def chunk_at(unit: Unit, index: int) -> Chunk:
    """Returns step `index` of the unit; the last one takes all that is left."""
    start = index * unit.step
    last = unit.chunks is not None and index == unit.chunks - 1
    return Chunk(
        unit.number, index, unit.first, unit.last, start, None if last else start + unit.step
    )
