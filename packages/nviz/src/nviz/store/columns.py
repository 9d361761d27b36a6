"""Single columns of a run's metrics, read without the others: for many runs at once.

A sealed part gives up only the columns that are asked for, and what it gave is kept, as it no
longer changes; a live file is read on from where the last reading ended. A row may arrive twice
(live, then sealed): the sealed one counts. A later attempt supersedes the steps from its first one
on: a run that reached step 161, then resumed at 110, shows the first attempt up to 109 and the
second from 110 on. Letters: N rows, ordered by attempt and step.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nviz.store.files import MetricsFile, list_metrics_files
from nviz.store.lines import GrowingLines
from nviz.store.parse import NON_FINITE, metrics_table
from nviz.store.recent import Recent
from nviz.store.runs import Signature

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

MOST_BYTES = 384 * 2**20
MOST_LIVE_BYTES = 128 * 2**20
MOST_BLOCKS = 16
STEP = "step"


@dataclass(frozen=True, slots=True)
class Column:
    """Values (N) of one metric, and where one was recorded; a NaN that is present was recorded."""

    values: Array
    present: Mask

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return int(self.values.nbytes + self.present.nbytes)


@dataclass(frozen=True, slots=True)
class Rows:
    """Chosen columns (N) of one rank of a run; `problems` names the files that could not be read.

    Columns that no file has are missing from `columns`.
    """

    step: NDArray[np.int64]
    attempt: NDArray[np.int64]
    superseded: Mask
    columns: dict[str, Column]
    problems: tuple[str, ...] = ()


# A file, and the columns that were read of it.
Piece = tuple[MetricsFile, dict[str, Column]]


@dataclass(slots=True)
class _Live:
    """What a live file has given so far, a table a block."""

    lines: GrowingLines
    signature: Signature | None = None
    blocks: list[pa.Table] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(int(block.nbytes) for block in self.blocks)


class ColumnReader:
    """Reads columns of runs through bounded caches. Safe to use from several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._sealed: Recent[tuple[Path, Signature, str], Column] = Recent(
            most_bytes, lambda column: column.size_bytes
        )
        self._names: Recent[tuple[Path, Signature], list[str]] = Recent(
            most_bytes // 16, lambda names: sum(64 + len(name) for name in names)
        )
        self._live: Recent[Path, _Live] = Recent(MOST_LIVE_BYTES, lambda live: live.size_bytes)
        self._live_lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes of values held."""
        return self._sealed.size_bytes + self._live.size_bytes

    def ranks(self, folder: Path) -> list[int]:
        """Ranks that recorded something, ascending."""
        return sorted({file.rank for file in _files(folder) if file.signature[1]})

    def metrics(self, folder: Path, rank: int | None = None) -> list[str]:
        """Names of the metrics that the newest files of each attempt of a rank hold, sorted."""
        names: set[str] = set()
        files = [file for file in files_of_rank(folder, rank) if file.signature[1]]
        for file in {(file.attempt, file.sealed): file for file in files}.values():
            try:
                names |= set(self._columns_of(file))
            except (OSError, pa.ArrowException):
                continue
        return sorted(names - {STEP})

    def signatures(self, folder: Path) -> tuple[Signature, ...]:
        """What the lowest ranks' files look like; equal ones give equal rows."""
        return tuple(file.signature for file in files_of_rank(folder))

    def rows(
        self,
        folder: Path,
        names: Sequence[str],
        rank: int | None = None,
        newest: int | None = None,
    ) -> Rows:
        """The columns `names` of a rank of the run in `folder`; without `rank`, of the lowest rank
        of each attempt. Never raises. With `newest`, parts are read from the last one back until
        they hold so many of the last steps.
        """
        problems: list[str] = []
        live = [file for file in files_of_rank(folder, rank) if not file.sealed]
        pieces = self._pieces(live, names, problems)
        # Looked for after the live rows were read: a part appears before its rows leave that file.
        sealed = [file for file in files_of_rank(folder, rank) if file.sealed]
        if newest is None:
            pieces = self._pieces(sealed, names, problems) + pieces
        else:
            pieces = self._newest_pieces(sealed, names, problems, newest, pieces) + pieces
        return _joined(pieces, names, tuple(problems))

    def _newest_pieces(
        self,
        sealed: Sequence[MetricsFile],
        names: Sequence[str],
        problems: list[str],
        newest: int,
        live: Sequence[Piece],
    ) -> list[Piece]:
        """The last of the parts, so many that with `live` they hold the last `newest` steps."""
        attempt = max((file.attempt for file, _ in live), default=-1)
        # What an earlier attempt left unsealed lies anywhere before.
        near = [piece for piece in live if piece[0].attempt == attempt]
        pieces: list[Piece] = []
        for file in reversed(sealed):
            if file.attempt > attempt:
                attempt, near = file.attempt, []
            if near and _last(near, attempt) - _first(near) + 1 >= newest:
                break
            found = self._pieces([file], names, problems)
            near += found
            pieces = found + pieces
        return pieces

    def _pieces(
        self, files: Sequence[MetricsFile], names: Sequence[str], problems: list[str]
    ) -> list[Piece]:
        """What each file holds; adds a line to `problems` for one that cannot be read."""
        pieces = []
        for file in files:
            try:
                found = self._read(file, [STEP, *names])
            except (OSError, pa.ArrowException, ValueError) as error:
                what = str(error).splitlines()[0][:160]
                problems.append(f"{file.path.name}: unreadable ({what})")
                continue
            if not file.sealed:
                problems += self._skipped(file)
            if STEP in found and len(found[STEP].values):
                pieces.append((file, found))
        return pieces

    def _skipped(self, file: MetricsFile) -> list[str]:
        """A line if lines of a live file could not be read."""
        live = self._live.get(file.path)
        count = live.lines.skipped if live else 0
        lines = "line" if count == 1 else "lines"
        return [f"{file.path.name}: {count} unreadable {lines} skipped"] if count else []

    def _columns_of(self, file: MetricsFile) -> list[str]:
        if not file.sealed:
            return sorted({n for block in self._live_blocks(file) for n in block.column_names})
        key = (file.path, file.signature)
        names = self._names.get(key)
        if names is None:
            names = [field.name for field in pq.read_schema(file.path) if is_metric(field.type)]
            self._names.put(key, names)
        return names

    def _read(self, file: MetricsFile, names: Sequence[str]) -> dict[str, Column]:
        if not file.sealed:
            return _of_blocks(self._live_blocks(file), names)
        found = {n: self._sealed.get((file.path, file.signature, n)) for n in names}
        missing = [name for name, column in found.items() if column is None]
        if missing:
            for name, column in read_part(file.path, missing).items():
                self._sealed.put((file.path, file.signature, name), column)
                found[name] = column
        return {name: column for name, column in found.items() if column is not None}

    def _live_blocks(self, file: MetricsFile) -> list[pa.Table]:
        with self._live_lock:
            live = self._live.get(file.path) or _Live(GrowingLines(file.path))
            if live.signature != file.signature:
                for at_start, data in live.lines.new_blocks_from():
                    if at_start:
                        live.blocks = []
                    parsed = metrics_table(data)
                    live.lines.skipped += parsed.skipped
                    live.blocks.append(parsed.table)
                if live.lines.is_empty:
                    live.blocks = []
                if len(live.blocks) > MOST_BLOCKS:
                    whole = pa.concat_tables(live.blocks, promote_options="default")
                    live.blocks = [whole.combine_chunks()]
                live.signature = file.signature
            self._live.put(file.path, live)
            return list(live.blocks)


def read_part(path: Path, names: Sequence[str]) -> dict[str, Column]:
    """Those of the columns `names` that a sealed part has. Raises OSError or ArrowException."""
    with pq.ParquetFile(path, memory_map=True) as part:
        known = [f.name for f in part.schema_arrow if f.name in names and is_metric(f.type)]
        table = part.read(known, use_threads=False)
    return {name: _column(table[name]) for name in known}


def _files(folder: Path) -> list[MetricsFile]:
    """Metrics files of all ranks, without those of the experts."""
    return [file for file in list_metrics_files(folder) if not file.experts]


def files_of_rank(folder: Path, rank: int | None = None) -> list[MetricsFile]:
    """Metrics files of a rank, or of the lowest rank of each attempt, by attempt and part."""
    files = _files(folder)
    lowest: dict[int, int] = {}
    for file in files:
        lowest[file.attempt] = min(file.rank, lowest.get(file.attempt, file.rank))
    chosen = [f for f in files if f.rank == (lowest[f.attempt] if rank is None else rank)]
    return sorted(chosen, key=lambda file: (file.attempt, file.path.name))


def _first(pieces: Sequence[Piece]) -> int:
    return int(min(found[STEP].values.min() for _, found in pieces))


def _last(pieces: Sequence[Piece], attempt: int) -> int:
    """The last step that an attempt recorded."""
    return int(max(found[STEP].values.max() for file, found in pieces if file.attempt == attempt))


def is_metric(kind: pa.DataType) -> bool:
    """Numbers, and text: a part may keep non-finite values as words."""
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_string(kind)
    )


def _column(found: pa.ChunkedArray) -> Column:
    if pa.types.is_string(found.type):
        texts = found.to_pylist()
        values = np.array([_number(text) for text in texts], dtype=np.float64)
        present = np.array([text is not None for text in texts], dtype=np.bool_)
        return Column(values, present & (np.isfinite(values) | np.isin(texts, list(NON_FINITE))))
    array = found.combine_chunks() if found.num_chunks != 1 else found.chunk(0)
    present = np.ones(len(array), dtype=np.bool_)
    if array.null_count:
        present = array.is_valid().to_numpy(zero_copy_only=False)
    values = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return Column(values, present)


def _number(text: str | None) -> float:
    try:
        return float(text) if text is not None else np.nan
    except ValueError:
        return np.nan


def _of_blocks(blocks: list[pa.Table], names: Sequence[str]) -> dict[str, Column]:
    """Columns of all blocks, one after the other; absent where a block lacks one."""
    known = {name for block in blocks for name in block.column_names}
    found = {}
    for name in names:
        if name not in known:
            continue
        parts = [
            _column(block[name]) if name in block.column_names else _absent(block.num_rows)
            for block in blocks
        ]
        found[name] = _concatenated(parts)
    return found


def _absent(count: int) -> Column:
    return Column(np.full(count, np.nan), np.zeros(count, dtype=np.bool_))


def _concatenated(parts: Sequence[Column]) -> Column:
    return Column(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.present for part in parts]),
    )


def _joined(
    pieces: list[Piece],
    names: Sequence[str],
    problems: tuple[str, ...],
) -> Rows:
    """All pieces as rows by attempt and step; of equal steps of an attempt the sealed one."""
    if not pieces:
        none = np.zeros(0, dtype=np.int64)
        return Rows(none, none, none.astype(np.bool_), {}, problems)
    steps = np.concatenate([found[STEP].values for _, found in pieces])
    attempts = np.concatenate(
        [np.full(len(found[STEP].values), file.attempt) for file, found in pieces]
    )
    keep = _first_of_equals(attempts, steps)
    known = [name for name in names if any(name in found for _, found in pieces)]
    columns = {}
    for name in known:
        parts = [
            found[name] if name in found else _absent(len(found[STEP].values))
            for _, found in pieces
        ]
        whole = _concatenated(parts)
        columns[name] = Column(whole.values[keep], whole.present[keep])
    step, attempt = steps[keep].astype(np.int64), attempts[keep].astype(np.int64)
    return Rows(step, attempt, superseded(attempt, step), columns, problems)


def _first_of_equals(attempts: NDArray[np.int64], steps: Array) -> NDArray[np.int64]:
    """Positions of the rows to keep, in order: of equal (attempt, step) the first that stands."""
    order = np.lexsort((np.arange(len(steps)), steps, attempts))
    a, s = attempts[order], steps[order]
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = (a[1:] != a[:-1]) | (s[1:] != s[:-1])
    fresh &= np.isfinite(s) & (s >= 0)
    return np.asarray(order[fresh])


def superseded(attempt: NDArray[np.int64], step: NDArray[np.int64]) -> Mask:
    """Whether a later attempt began at or before each row's step. Rows are ordered by attempt."""
    out = np.zeros(len(step), dtype=np.bool_)
    horizon = np.iinfo(np.int64).max
    for number in np.unique(attempt)[::-1]:
        rows = attempt == number
        out[rows] = step[rows] >= horizon
        horizon = min(horizon, int(step[rows].min()))
    return out
