"""One run's expert loads as arrays, read again only where a file grew.

Letters: S steps, L layers, E experts. A block is what one file holds, or one stretch of its lines:
`load_SLE` counts the tokens of each expert, NaN where that was not recorded. A layer with fewer
experts than others ends in NaN.

Counts of several ranks are added. Of equal rows (attempt, rank, step) the sealed one counts, and
the rows from a later attempt's first step on are left out. Loads are large, so they are thinned:
once more than `most_cells` numbers are held, only steps divisible by a doubled stride stay, and the
newest.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nviz.store.files import MetricsFile, list_metrics_files
from nviz.store.lines import GrowingLines
from nviz.store.parse import experts_table, parse_line
from nviz.store.runs import Signature

Steps = NDArray[np.int64]
Loads = NDArray[np.float32]

MOST_CELLS = 36_000_000
STRETCH = 256
BIAS_COLUMNS = ("step", "layers", "bias")
READERS = 2


@dataclass(frozen=True, slots=True)
class Block:
    """Loads of some steps of one rank in one attempt; `layers` are the layers' numbers."""

    attempt: int
    rank: int
    sealed: bool
    layers: tuple[int, ...]
    step_S: Steps
    load_SLE: Loads

    def only(self, keep: NDArray[np.bool_]) -> "Block":
        """The block with the chosen steps."""
        return replace(self, step_S=self.step_S[keep], load_SLE=self.load_SLE[keep])


@dataclass(slots=True)
class _File:
    """What is known of one file: what was read of it, and why the rest could not be."""

    lines: GrowingLines | None
    signature: Signature | None = None
    blocks: tuple[Block, ...] = ()
    skipped: int = 0
    problem: str | None = None


class ExpertLoads:
    """Expert loads of the run in `folder`. Not safe to use from several threads."""

    def __init__(self, folder: Path, most_cells: int = MOST_CELLS) -> None:
        self.folder = folder
        self._most_cells = most_cells
        self._files: dict[Path, _File] = {}
        self._stride = 1
        self._counted: list[Block] | None = None
        self._bias_read: tuple[object, tuple[tuple[int, ...], Loads] | None] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that the loads take."""
        blocks = (block for file in self._files.values() for block in file.blocks)
        return sum(block.load_SLE.nbytes + block.step_S.nbytes for block in blocks)

    def refresh(self) -> None:
        """Reads what the files gained since the last call. Never raises: see `problems`."""
        live = [file for file in self._present() if not file.sealed and self._is_new(file)]
        for file in live:
            self._read(file)
        # Looked for after the live rows were read: a part appears before its rows leave that file.
        present = self._present()
        gone = self._files.keys() - {file.path for file in present}
        for path in gone:
            del self._files[path]
        sealed = [file for file in present if file.sealed and self._is_new(file)]
        if sealed:
            # Decoding a part holds no lock of Python's, so two parts take the time of one.
            with ThreadPoolExecutor(READERS) as pool:
                list(pool.map(self._read, sealed))
        if live or sealed or gone:
            self._thin()
            self._counted = None

    def problems(self) -> list[str]:
        """One line for each file that could not be read in full."""
        found = [
            f"{path.name}: {file.problem}" for path, file in self._files.items() if file.problem
        ]
        for path, file in self._files.items():
            if file.skipped:
                plural = "s" if file.skipped > 1 else ""
                found.append(f"{path.name}: {file.skipped} unreadable row{plural} skipped")
        return found

    def blocks(self) -> list[Block]:
        """The rows that count, none twice."""
        if self._counted is None:
            found = [block for file in self._files.values() for block in file.blocks]
            self._counted = list(_without_superseded(_without_doubles(found)))
        return self._counted

    def bias_at(self, step: int) -> tuple[tuple[int, ...], Loads] | None:
        """Layers and the balancing bias (L, E) recorded at `step`, or None if there is none.

        All ranks have the same. It is read for that step alone: all of it is as large as the loads.
        """
        counted = next((b for b in self.blocks() if (b.step_S == step).any()), None)
        if counted is None:
            return None
        key = (counted.attempt, counted.rank, counted.sealed)
        for path, file in self._files.items():
            if any(
                (b.attempt, b.rank, b.sealed) == key and (b.step_S == step).any()
                for b in file.blocks
            ):
                return self._bias(path, file, step)
        return None

    def _bias(self, path: Path, file: _File, step: int) -> tuple[tuple[int, ...], Loads] | None:
        wanted = (path, file.signature, step)
        if self._bias_read is None or self._bias_read[0] != wanted:
            try:
                row = _bias_row(path, step)
            except (OSError, pa.ArrowException, ValueError, KeyError):
                row = None
            self._bias_read = (wanted, row)
        return self._bias_read[1]

    def _present(self) -> list[MetricsFile]:
        return [file for file in list_metrics_files(self.folder) if file.experts]

    def _is_new(self, file: MetricsFile) -> bool:
        known = self._files.get(file.path)
        return known is None or known.signature != file.signature

    def _read(self, file: MetricsFile) -> None:
        lines = None if file.sealed else GrowingLines(file.path)
        known = self._files.setdefault(file.path, _File(lines))
        known.signature, known.problem = file.signature, None
        try:
            if file.sealed:
                found, known.skipped = _part(file)
                known.blocks = tuple(self._thinned(block) for block in found)
            else:
                self._read_lines(known, file)
        except (OSError, pa.ArrowException, ValueError, KeyError) as error:
            known.problem = f"unreadable ({str(error).splitlines()[0][:160]})"

    def _read_lines(self, known: _File, file: MetricsFile) -> None:
        assert known.lines is not None
        for at_start, data in known.lines.new_blocks_from():
            if at_start:
                known.blocks, known.skipped = (), 0
            parsed = experts_table(data)
            found, skipped = _of_table(parsed.table, file)
            known.skipped += parsed.skipped + skipped
            known.blocks += tuple(found)
        if known.lines.is_empty:
            known.blocks, known.skipped = (), 0
        known.blocks = tuple(_merged(known.blocks))

    def _thinned(self, block: Block) -> Block:
        if self._stride == 1:
            return block
        return block.only(block.step_S % self._stride == 0)

    def _thin(self) -> None:
        """Keeps the loads within their limit; the newest step of a file stays."""
        while self._cells() > self._most_cells and self._stride < 2**40:
            self._stride *= 2
            for file in self._files.values():
                file.blocks = tuple(self._strided(block) for block in file.blocks)

    def _strided(self, block: Block) -> Block:
        keep = block.step_S % self._stride == 0
        if not block.sealed:
            keep[-1:] = True
        return block.only(keep)

    def _cells(self) -> int:
        return sum(b.load_SLE.size for file in self._files.values() for b in file.blocks)


def _part(file: MetricsFile) -> tuple[list[Block], int]:
    """A sealed part's rows as blocks, a stretch at a time: its counts are wider than the blocks."""
    found: list[Block] = []
    skipped = 0
    with pq.ParquetFile(file.path, memory_map=True) as part:
        known = [n for n in ("step", "layers", "load") if n in part.schema_arrow.names]
        for batch in part.iter_batches(STRETCH, columns=known, use_threads=False):
            blocks, unusable = _of_table(pa.Table.from_batches([batch]), file)
            found += blocks
            skipped += unusable
    return list(_merged(found)), skipped


def _bias_row(path: Path, step: int) -> tuple[tuple[int, ...], Loads] | None:
    """Layers and bias (L, E) of the row of `step` in a file of expert loads."""
    if path.suffix == ".parquet":
        known = [name for name in BIAS_COLUMNS if name in pq.read_schema(path).names]
        table = pq.read_table(path, columns=known, filters=[("step", "=", step)], use_threads=False)
        rows = table.to_pylist()
    else:
        rows = [row for line in _lines_of(path, step) if (row := parse_line(line))]
    for row in reversed(rows):
        if row.get("step") == step and (bias := _matrix(row | {"load": row.get("bias")})):
            bias_LE = np.full((len(bias), max(map(len, bias))), np.nan, dtype=np.float32)
            for at, part in enumerate(bias):
                bias_LE[at, : len(part)] = part
            return _numbers(row.get("layers"), len(bias)), bias_LE
    return None


def _lines_of(path: Path, step: int) -> list[bytes]:
    """Lines of a live file that may hold `step`: the others are long, and not worth parsing."""
    begins = re.compile(rb'"step"\s*:\s*%d\b' % step)
    return [line for line in path.read_bytes().splitlines() if begins.search(line)]


def _of_table(table: pa.Table, file: MetricsFile) -> tuple[list[Block], int]:
    """The table's rows as blocks of equal layers, and how many rows could not be used."""
    if table.num_rows == 0:
        return [], 0
    if "load" not in table.column_names or "step" not in table.column_names:
        raise ValueError("no columns named step and load")
    table = table.combine_chunks()
    step_S = table["step"].cast(pa.int64(), safe=False).to_numpy()
    load_SLE = _regular(table["load"].chunk(0))
    if load_SLE is None:
        return _of_rows(table, file)
    layers = _common_layers(table, load_SLE.shape[1])
    if layers is None:
        return _of_rows(table, file)
    return [Block(file.attempt, file.rank, file.sealed, layers, step_S, load_SLE)], 0


def _regular(load: pa.Array) -> Loads | None:
    """Nested lists of equal lengths as an array (S, L, E), or None if they are anything else."""
    if load.null_count or not _is_nested(load.type):
        return None
    rows = load.flatten()
    if rows.null_count or len(rows) == 0 or len(rows) % len(load):
        return None
    cells = rows.flatten()
    if cells.null_count or len(cells) == 0 or len(cells) % len(rows):
        return None
    layers, experts = len(rows) // len(load), len(cells) // len(rows)
    if not (_is_even(load, layers) and _is_even(rows, experts)):
        return None
    return np.asarray(cells.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(
        len(load), layers, experts
    )


def _is_nested(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) and pa.types.is_list(kind.value_type)):
        return False
    inner = kind.value_type.value_type
    return bool(pa.types.is_integer(inner) or pa.types.is_floating(inner))


def _is_even(lists: pa.Array, length: int) -> bool:
    return bool((np.diff(lists.offsets.to_numpy()) == length).all())


def _common_layers(table: pa.Table, count: int) -> tuple[int, ...] | None:
    """The layers' numbers if all rows have the same, else None; positions where no row has any."""
    if "layers" not in table.column_names or table["layers"].null_count == table.num_rows:
        return tuple(range(count))
    lists = table["layers"].chunk(0)
    if lists.null_count or not _is_even(lists, count):
        return None
    numbers = lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, count)
    if (numbers != numbers[0]).any():
        return None
    return tuple(int(number) for number in numbers[0])


def _of_rows(table: pa.Table, file: MetricsFile) -> tuple[list[Block], int]:
    """Like `_of_table`, row by row: for rows of different layers, widths or types."""
    rows = table.to_pylist()
    usable = [(row, load) for row in rows if (load := _matrix(row)) is not None]
    shapes = Counter(tuple(len(part) for part in load) for _, load in usable)
    if not shapes:
        return [], len(rows)
    common = shapes.most_common(1)[0][0]
    kept = [(row, load) for row, load in usable if tuple(len(p) for p in load) == common]
    wide = max(common, default=0)
    found = []
    for row, load in kept:
        load_SLE = np.full((1, len(common), wide), np.nan, dtype=np.float32)
        for at, part in enumerate(load):
            load_SLE[0, at, : len(part)] = part
        step_S = np.array([row["step"]], dtype=np.int64)
        layers = _numbers(row.get("layers"), len(common))
        found.append(Block(file.attempt, file.rank, file.sealed, layers, step_S, load_SLE))
    return list(_merged(found)), len(rows) - len(kept)


def _matrix(row: dict[str, Any]) -> list[list[float]] | None:
    """A row's load as numbers, NaN for none; None for no step, no list of lists, or no layer."""
    load, step = row.get("load"), row.get("step")
    if not isinstance(step, int) or step < 0 or not load:
        return None
    if not all(isinstance(part, list) and part for part in load):
        return None
    try:
        return [[np.nan if value is None else float(value) for value in part] for part in load]
    except ValueError:
        return None


def _numbers(found: list[int] | None, count: int) -> tuple[int, ...]:
    return tuple(found) if found and len(found) == count else tuple(range(count))


def _merged(blocks: Sequence[Block]) -> Iterator[Block]:
    """Neighbouring blocks of the same layers and width as one."""
    run: list[Block] = []
    for block in blocks:
        if run and (run[0].layers, run[0].load_SLE.shape[1:]) != (
            block.layers,
            block.load_SLE.shape[1:],
        ):
            yield _one(run)
            run = []
        run.append(block)
    if run:
        yield _one(run)


def _one(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    steps = np.concatenate([block.step_S for block in blocks])
    return replace(blocks[0], step_S=steps, load_SLE=np.concatenate([b.load_SLE for b in blocks]))


def _without_doubles(blocks: list[Block]) -> Iterator[Block]:
    """Blocks without rows whose (attempt, rank, step) an earlier one has, sealed ones first."""
    seen: dict[tuple[int, int], Steps] = {}
    for block in sorted(blocks, key=lambda block: not block.sealed):
        key = (block.attempt, block.rank)
        known = seen.get(key, np.zeros(0, dtype=np.int64))
        # Of equal steps in one block the last one counts, as lines may be written again.
        last = len(block.step_S) - 1 - np.unique(block.step_S[::-1], return_index=True)[1]
        keep = np.zeros(len(block.step_S), dtype=np.bool_)
        keep[last] = True
        keep &= ~np.isin(block.step_S, known) & (block.step_S >= 0)
        seen[key] = np.concatenate([known, block.step_S[keep]])
        yield block if keep.all() else block.only(keep)


def _without_superseded(blocks: Iterator[Block]) -> Iterator[Block]:
    """Blocks without the rows at and after a later attempt's first step."""
    kept = [block for block in blocks if len(block.step_S)]
    starts: dict[int, int] = {}
    for block in kept:
        first = int(block.step_S.min())
        starts[block.attempt] = min(first, starts.get(block.attempt, first))
    for block in kept:
        later = [first for attempt, first in starts.items() if attempt > block.attempt]
        keep = block.step_S < min(later, default=np.iinfo(np.int64).max)
        if keep.any():
            yield block if keep.all() else block.only(keep)
