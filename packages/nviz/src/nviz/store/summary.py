"""The line that a run has in the list: last loss, validation loss, rate, and a small loss curve.

A list of thousands of runs must not parse every record. Of a run's sealed parts at most `PARTS`,
spread evenly, give up four columns, and those that hold the newest `RECENT` steps, so that a loss
that was not finite for one of these is seen; a large JSONL file is read in `WINDOWS` short pieces
spread over it, its last one included, and its end is searched for such losses; the last evaluation
comes from the end of the events. A run that has ended is looked at again only when its metrics
folder changes.
"""

import math
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from nviz.store.columns import files_of_rank, read_part
from nviz.store.files import MetricsFile
from nviz.store.lines import last_lines
from nviz.store.parse import number, parse_line, parse_lines, step_number
from nviz.store.plain import open_plain
from nviz.store.recent import Recent
from nviz.store.runs import Run, Signature

WINDOWS = 48
WINDOW_BYTES = 8192
SPARK_POINTS = 40
PARTS = 12
RECENT = 1000
EVALUATION = b'"loss/validation"'
BAD_LOSS = re.compile(rb'"loss/train":\s*"?(?:NaN|-?Infinity)')
BAD_LOSS_BYTES = 4 * 2**20
CHUNK_BYTES = 2**20
SEARCH_BYTES = 32 * 2**20
LONGEST_LINE_BYTES = 2**16
EVENT_BYTES = 2**17
COLUMNS = ("loss/train", "loss/validation", "tokens_per_s", "router/load_imbalance")
POINT_BYTES = 160
MOST_POINT_BYTES = 64 * 2**20


class Point(NamedTuple):
    """A step's few values; None where the record had none."""

    step: int
    loss: float | None
    validation: float | None
    tokens_per_s: float | None
    imbalance: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the list shows of a run beside run.json.

    `bad_step` is the last of the newest `RECENT` steps whose loss was not finite. `spark` holds at
    most `SPARK_POINTS` finite losses.
    """

    step: int | None = None
    loss: float | None = None
    validation: float | None = None
    tokens_per_s: float | None = None
    imbalance: float | None = None
    bad_step: int | None = None
    spark: tuple[float, ...] = ()


def _point(line: bytes) -> Point | None:
    record = parse_line(line)
    step = step_number(record.get("step")) if record else None
    if record is None or step is None:
        return None
    return Point(step, *(number(record.get(name)) for name in COLUMNS))


def _windows(size: int) -> list[tuple[int, int]]:
    """Byte ranges to read of a file of `size` bytes: all of it, or pieces spread over it."""
    if size <= WINDOWS * WINDOW_BYTES:
        return [(0, size)]
    stride = (size - WINDOW_BYTES) / (WINDOWS - 1)
    starts = [round(i * stride) for i in range(WINDOWS)]
    return [(start, WINDOW_BYTES) for start in starts]


def sample_lines(path: Path) -> list[Point]:
    """Points of a JSONL file by step: an even spread, the last whole line, the last evaluation, and
    the losses in its last `BAD_LOSS_BYTES` that are not finite.
    """
    with open_plain(path) as file:
        windows = _windows(os.fstat(file.fileno()).st_size)
        lines = [line for window in windows for line in _spread_lines(file, window, len(windows))]
        lines += _last_evaluation(file) + _bad_losses(file)
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


def _bad_losses(file: BinaryIO) -> list[bytes]:
    """The whole lines near the end of the file whose loss is not finite."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - BAD_LOSS_BYTES)
    file.seek(start)
    data = file.read(BAD_LOSS_BYTES)
    first = data.find(b"\n") + 1 if start else 0
    lines = data[first : data.rfind(b"\n") + 1]
    if not BAD_LOSS.search(lines):
        return []
    return [line for line in lines.splitlines() if BAD_LOSS.search(line)]


def _line_around(file: BinaryIO, position: int) -> bytes | None:
    """The line that holds `position`, or None if its end is not written yet."""
    start = max(0, position - LONGEST_LINE_BYTES)
    file.seek(start)
    data = file.read(2 * LONGEST_LINE_BYTES)
    middle = position - start
    first, end = data.rfind(b"\n", 0, middle) + 1, data.find(b"\n", middle)
    return data[first:end] if end >= 0 else None


def sample_part(path: Path, count: int) -> list[Point]:
    """About `count` points of a sealed part by step: its last row, an even spread, evaluations, and
    those of its last `RECENT` losses that are not finite.
    """
    found = read_part(path, ("step", *COLUMNS))
    if "step" not in found or not len(found["step"].values):
        return []
    rows = len(found["step"].values)
    chosen = set(range(rows - 1, -1, -max(1, rows // count)))
    if COLUMNS[1] in found:
        chosen |= set(found[COLUMNS[1]].present.nonzero()[0].tolist())
    if COLUMNS[0] in found:
        loss = found[COLUMNS[0]]
        bad = (loss.present & ~np.isfinite(loss.values))[-RECENT:]
        chosen |= set((bad.nonzero()[0] + rows - len(bad)).tolist())
    points = []
    for at in sorted(chosen):
        values = [
            float(found[name].values[at]) if name in found and found[name].present[at] else None
            for name in COLUMNS
        ]
        step = step_number(float(found["step"].values[at]))
        if step is not None:
            points.append(Point(step, *values))
    return sorted(points)


def last_evaluation(path: Path) -> float | None:
    """The newest `loss/validation` in the end of an events file that no resume left behind."""
    try:
        data, _ = last_lines(path, EVENT_BYTES)
    except OSError:
        return None
    records, _ = parse_lines(data)
    found: dict[int, float] = {}
    for record in records:
        step, loss = step_number(record.get("step")), number(record.get(COLUMNS[1]))
        if step is None:
            continue
        if record.get("event") == "resume":
            found = {known: value for known, value in found.items() if known <= step}
        elif record.get("event") == "eval" and loss is not None:
            found[step] = loss
    return found[max(found)] if found else None


def join_attempts(points: dict[int, list[Point]]) -> list[Point]:
    """Points by step; a later attempt replaces what earlier ones wrote from its first step on."""
    kept: list[Point] = []
    for _, found in sorted(points.items()):
        if not found:
            continue
        ordered = sorted({point.step: point for point in found}.values())
        kept = [point for point in kept if point.step < ordered[0].step] + ordered
    return kept


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def summarise(run: Run, points: list[Point], evaluated: float | None) -> Summary:
    """The summary of ordered points; a result in run.json goes before the metrics.

    `evaluated` is the last evaluation that an event holds.
    """
    finite = [(p.step, p.loss) for p in points if p.loss is not None and math.isfinite(p.loss)]
    measured = _last([p.validation for p in points])
    return Summary(
        step=points[-1].step if points else run.step,
        loss=_last([p.loss for p in points]),
        validation=run.results.get(COLUMNS[1], evaluated if evaluated is not None else measured),
        tokens_per_s=_last([p.tokens_per_s for p in points]),
        imbalance=_last([p.imbalance for p in points]),
        bad_step=_bad_step(points),
        spark=tuple(spread(finite, SPARK_POINTS)),
    )


def _bad_step(points: list[Point]) -> int | None:
    recent = (p for p in reversed(points) if p.step > points[-1].step - RECENT)
    return next((p.step for p in recent if p.loss is not None and not math.isfinite(p.loss)), None)


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


def _chosen(parts: list[MetricsFile]) -> list[MetricsFile]:
    """At most `PARTS` parts of an attempt, spread evenly, the first and the last among them."""
    if len(parts) <= PARTS:
        return parts
    return [parts[round(i * (len(parts) - 1) / (PARTS - 1))] for i in range(PARTS)]


@dataclass(frozen=True, slots=True)
class _Known:
    """A summary, what it was made from, and when the metrics folder last changed."""

    files: tuple[Signature, ...]
    folder_mtime_ns: int
    run: Run
    summary: Summary


class Summaries:
    """Summaries of runs, made again where files changed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Known] = {}
        self._points: Recent[tuple[Path, Signature, int], list[Point]] = Recent(
            MOST_POINT_BYTES, lambda points: 100 + POINT_BYTES * len(points)
        )

    def known(self, run: Run) -> tuple[Summary | None, bool]:
        """The last summary of `run` if there is one, and whether it is still right."""
        found = self._known.get((run.key, run.identity))
        if found is None:
            return None, False
        # A stalled run that goes on is no longer stalled, so it is another run than the one known.
        fresh = found.run == run and run.status != "running"
        return found.summary, fresh and _mtime_ns(run.folder) == found.folder_mtime_ns

    def forget(self, runs: dict[str, Run]) -> None:
        """Lets go of all runs but these."""
        kept = {(run.key, run.identity) for run in runs.values()}
        with self._lock:
            self._known = {key: known for key, known in self._known.items() if key in kept}

    def summary(self, run: Run) -> Summary:
        """The summary of `run`, from the files of each attempt's lowest rank."""
        mtime_ns = _mtime_ns(run.folder)
        files = files_of_rank(run.folder)
        signatures = tuple(file.signature for file in files)
        key = (run.key, run.identity)
        known = self._known.get(key)
        if known is not None and known.files == signatures and known.run == run:
            return known.summary
        made = summarise(run, self._sampled(files), last_evaluation(run.folder / "events.jsonl"))
        with self._lock:
            self._known[key] = _Known(signatures, mtime_ns, run, made)
        return made

    def _sampled(self, files: list[MetricsFile]) -> list[Point]:
        attempts = sorted({file.attempt for file in files})
        points = {at: self._of_attempt([f for f in files if f.attempt == at]) for at in attempts}
        return join_attempts(points)

    def _of_attempt(self, files: list[MetricsFile]) -> list[Point]:
        """Points of an attempt; where a step stands in two files, the sealed one's comes last."""
        sealed = [file for file in files if file.sealed]
        chosen = _chosen(sealed)
        count = max(2, 2 * SPARK_POINTS // max(1, len(chosen)))
        live = [p for file in files if not file.sealed for p in self._sample(file, count)]
        newest = max((point.step for point in live), default=0)
        parts: list[Point] = []
        is_recent = True
        for file in reversed(sealed):
            if not is_recent and file not in chosen:
                continue
            found = self._sample(file, count)
            if found:
                newest = max(newest, found[-1].step)
                # What comes before this part is older.
                is_recent = is_recent and found[0].step > newest - RECENT
            parts = found + parts
        return live + parts

    def _sample(self, file: MetricsFile, count: int) -> list[Point]:
        key = (file.path, file.signature, count)
        known = self._points.get(key)
        if known is not None:
            return known
        try:
            points = sample_part(file.path, count) if file.sealed else sample_lines(file.path)
        except (OSError, pa.ArrowException, ValueError):
            # The run's own page names the file; the list shows what the others hold.
            points = []
        self._points.put(key, points)
        return points


def _mtime_ns(folder: Path) -> int:
    try:
        return (folder / "metrics").stat().st_mtime_ns
    except OSError:
        return 0
