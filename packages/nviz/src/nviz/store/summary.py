"""The line that a run has in the list: last loss, validation loss, rate, and a small loss curve.

A list of hundreds of runs must not parse every record, so a large JSONL file is read in `WINDOWS`
short pieces spread evenly over it, its last one included; a Parquet part gives up only the few
columns needed. What a file yields is kept until the file changes.
"""

import math
import os
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import duckdb

from nviz.store.files import MetricsFile, list_metrics_files
from nviz.store.parse import number, parse_line, step_number
from nviz.store.run_data import literal, quoted
from nviz.store.runs import Run, Signature

WINDOWS = 48
WINDOW_BYTES = 8192
SPARK_POINTS = 40
EVALUATION = b'"loss/validation"'
CHUNK_BYTES = 2**20
SEARCH_BYTES = 32 * 2**20
LONGEST_LINE_BYTES = 2**16
COLUMNS = ("loss/train", "loss/validation", "tokens_per_s")


class Point(NamedTuple):
    """A step's few values; None where the record had none."""

    step: int
    loss: float | None
    validation: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the list shows of a run beside run.json.

    `spark` holds at most `SPARK_POINTS` finite losses.
    """

    step: int | None = None
    loss: float | None = None
    validation: float | None = None
    tokens_per_s: float | None = None
    spark: tuple[float, ...] = ()


def _point(line: bytes) -> Point | None:
    record = parse_line(line)
    step = step_number(record.get("step")) if record else None
    if record is None or step is None:
        return None
    loss, validation, rate = (number(record.get(name)) for name in COLUMNS)
    return Point(step, loss, validation, rate)


def _windows(size: int) -> list[tuple[int, int]]:
    """Byte ranges to read of a file of `size` bytes: all of it, or pieces spread over it."""
    if size <= WINDOWS * WINDOW_BYTES:
        return [(0, size)]
    stride = (size - WINDOW_BYTES) / (WINDOWS - 1)
    starts = [round(i * stride) for i in range(WINDOWS)]
    return [(start, WINDOW_BYTES) for start in starts]


def sample_lines(path: Path) -> list[Point]:
    """Points of a JSONL file by step: an even spread, the last whole line, the last evaluation."""
    with path.open("rb") as file:
        windows = _windows(os.fstat(file.fileno()).st_size)
        lines = [line for window in windows for line in _spread_lines(file, window, len(windows))]
        lines += _last_evaluation(file)
    points = [point for line in lines if (point := _point(line))]
    return sorted({point.step: point for point in points}.values())


def _spread_lines(file: BinaryIO, window: tuple[int, int], windows: int) -> list[bytes]:
    """Some whole lines of a window, counted back from its last one."""
    start, length = window
    file.seek(start)
    data = file.read(length)
    first = data.find(b"\n") + 1 if start else 0
    lines = data[first : data.rfind(b"\n") + 1].splitlines()
    stride = max(1, len(lines) * windows // (2 * WINDOWS))
    return lines[::-1][::stride][::-1]


def _last_evaluation(file: BinaryIO) -> list[bytes]:
    """The last line that holds an evaluation, looked for from the end of the file backwards."""
    end = size = file.seek(0, os.SEEK_END)
    while end > 0 and size - end < SEARCH_BYTES:
        start = max(0, end - CHUNK_BYTES)
        file.seek(start)
        # Some bytes more, as the words may lie across two pieces.
        found = file.read(end - start + len(EVALUATION) - 1).rfind(EVALUATION)
        if found < 0:
            end = start
            continue
        line = _line_around(file, start + found)
        if line is not None:
            return [line]
        end = start + found
    return []


def _line_around(file: BinaryIO, position: int) -> bytes | None:
    """The line that holds `position`, or None if its end is not written yet."""
    start = max(0, position - LONGEST_LINE_BYTES)
    file.seek(start)
    data = file.read(2 * LONGEST_LINE_BYTES)
    middle = position - start
    first, end = data.rfind(b"\n", 0, middle) + 1, data.find(b"\n", middle)
    return data[first:end] if end >= 0 else None


def sample_part(path: Path, connection: duckdb.DuckDBPyConnection) -> list[Point]:
    """Points of a sealed part by step: its evaluations, its last row, an even spread."""
    source = f"read_parquet({literal(str(path))})"
    present = {row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
    values = [
        f"TRY_CAST({quoted(name)} AS DOUBLE)" if name in present else "NULL" for name in COLUMNS
    ]
    rows = connection.execute(
        f"""
        WITH numbered AS (
            SELECT TRY_CAST(step AS BIGINT) AS step, {values[0]} AS loss, {values[1]} AS validation,
                   {values[2]} AS rate, row_number() OVER (ORDER BY step) AS n,
                   count(*) OVER () AS total
            FROM {source} WHERE step >= 0)
        SELECT step, loss, validation, rate FROM numbered
        WHERE step IS NOT NULL
          AND (n % greatest(1, total // {4 * SPARK_POINTS}) = 0 OR n = total
               OR validation IS NOT NULL)
        ORDER BY n
        """
    ).fetchall()
    return [Point(*row) for row in rows]


def join_attempts(points: dict[int, list[Point]]) -> list[Point]:
    """Points by step; a later attempt replaces what earlier ones wrote from its first step on."""
    kept: list[Point] = []
    for _, found in sorted(points.items()):
        if not found:
            continue
        ordered = sorted({point.step: point for point in found}.values())
        kept = [point for point in kept if point.step < ordered[0].step] + ordered
    return kept


def _last(values: list[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def summarise(run: Run, points: list[Point]) -> Summary:
    """The summary of ordered points; a result in run.json goes before the metrics."""
    finite = [(p.step, p.loss) for p in points if p.loss is not None and math.isfinite(p.loss)]
    return Summary(
        step=points[-1].step if points else run.step,
        loss=_last([p.loss for p in points]),
        validation=run.results.get("loss/validation", _last([p.validation for p in points])),
        tokens_per_s=_last([p.tokens_per_s for p in points]),
        spark=tuple(spread(finite, SPARK_POINTS)),
    )


def spread(points: list[tuple[int, float]], count: int) -> list[float]:
    """At most `count` values, those nearest to evenly spaced steps, both ends among them.

    `points` are (step, value), ordered. Even in step, as files are sampled unevenly.
    """
    if len(points) <= count:
        return [value for _, value in points]
    steps = [step for step, _ in points]
    marks = [steps[0] + i * (steps[-1] - steps[0]) / (count - 1) for i in range(count)]
    return [points[_nearest(steps, mark)][1] for mark in marks]


def _nearest(steps: list[int], mark: float) -> int:
    right = min(bisect_left(steps, mark), len(steps) - 1)
    left = max(right - 1, 0)
    return left if mark - steps[left] <= steps[right] - mark else right


class Summaries:
    """Summaries of runs, with what each file yielded kept. Not safe to use from several threads."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._points: dict[Path, tuple[Signature, list[Point]]] = {}

    def summary(self, run: Run) -> Summary:
        """The summary of `run`, from its lowest rank's files."""
        files = [file for file in list_metrics_files(run.folder) if not file.experts]
        lowest = min((file.rank for file in files), default=0)
        points: dict[int, list[Point]] = {}
        # Live rows first: where a step stands in both, the sealed one is put last and stays.
        for file in sorted(files, key=lambda file: file.sealed):
            if file.rank == lowest:
                points.setdefault(file.attempt, []).extend(self._sample(file))
        return summarise(run, join_attempts(points))

    def _sample(self, file: MetricsFile) -> list[Point]:
        known = self._points.get(file.path)
        if known and known[0] == file.signature:
            return known[1]
        try:
            if file.sealed:
                points = sample_part(file.path, self._connection)
            else:
                points = sample_lines(file.path)
        except (OSError, duckdb.Error):
            # The run's own page names the file; the list shows what the others hold.
            points = []
        self._points[file.path] = (file.signature, points)
        return points
