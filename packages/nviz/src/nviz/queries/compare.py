"""Curves of several runs beside one another, and their spread where runs differ in the seed alone.

Letters: R runs of a group, G points of the grid on which they are brought together.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nviz.queries.curves import (
    AXIS_COLUMNS,
    Array,
    Axis,
    Curve,
    Table,
    curve,
    downsample,
    smooth,
    table_of,
)
from nviz.store.columns import ColumnReader, Rows
from nviz.store.recent import Recent
from nviz.store.runs import Run

Grouping = Literal["run", "group", "seed"]

GRID = 300
READERS = 2
MOST_BYTES = 32 * 2**20
AXIS_NAMES = tuple(name for name in AXIS_COLUMNS.values() if name != "step")
# Points of all curves of one chart together, so that fifty draw as fast as five.
MOST_POINTS = 16_000
# Settings that tell seeds and folders apart, and change nothing else.
SEEDS = (("run", "seed"), ("run", "dir"), ("run", "name"), ("run", "tags"), ("run", "group"))


@dataclass(frozen=True, slots=True)
class Line:
    """One run's curve of one metric, down-sampled; `bad` are the non-finite values' places.

    `earlier_x`, `earlier_y` are what a later attempt did again, a NaN between two attempts.
    """

    label: str
    x: Array
    y: Array
    bad_x: Array
    bad_words: list[str]
    earlier_x: Array = field(default_factory=lambda: np.zeros(0))
    earlier_y: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def is_empty(self) -> bool:
        """Whether the run did not record the metric along this axis."""
        return len(self.x) == 0 and len(self.bad_x) == 0


@dataclass(frozen=True, slots=True)
class Band:
    """Mean, lowest and highest (G) of a group's runs along x, of those that were there.

    `shrinks`: not all of them reach the end, so that the last means are of fewer.
    """

    label: str
    runs: int
    x: Array
    mean: Array
    low: Array
    high: Array
    shrinks: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """How a curve is made of a run's rows: see `Lines.draw`; `buckets` as in `downsample`."""

    axis: Axis
    smoothing: float
    buckets: int
    earlier: bool


class Lines:
    """Down-sampled curves of runs, made again only where a run's files changed.

    Safe to use from several threads.
    """

    def __init__(self, columns: ColumnReader) -> None:
        self._columns = columns
        self._known: Recent[tuple[object, ...], Line] = Recent(
            MOST_BYTES,
            lambda line: 400 + 16 * (len(line.x) + len(line.earlier_x)) + 80 * len(line.bad_x),
        )

    def draw(
        self,
        runs: Mapping[str, Run],
        metrics: Sequence[str],
        axis: Axis,
        smoothing: float,
        earlier: bool = False,
    ) -> tuple[dict[str, list[Line]], list[str]]:
        """Each metric's curves of `runs`, given by label, and what could not be read.

        With `earlier` also what later attempts did again.
        """
        buckets = max(40, MOST_POINTS // (2 * max(1, len(runs))))
        with ThreadPoolExecutor(READERS) as pool:
            shape = Shape(axis, smoothing, buckets, earlier)
            made = pool.map(
                lambda item: self._of_run(item[0], item[1], metrics, shape), runs.items()
            )
        found: dict[str, list[Line]] = {metric: [] for metric in metrics}
        problems = []
        for lines, unreadable in made:
            problems += unreadable
            for metric, line in lines.items():
                found[metric].append(line)
        return found, problems

    def _of_run(
        self, label: str, run: Run, metrics: Sequence[str], shape: Shape
    ) -> tuple[dict[str, Line], list[str]]:
        base = (run.folder, self._columns.signatures(run.folder), shape)
        lines = {metric: self._known.get((*base, metric)) for metric in metrics}
        missing = [metric for metric, line in lines.items() if line is None]
        problems: list[str] = []
        if missing:
            rows = self._columns.rows(run.folder, [*missing, *AXIS_NAMES])
            table = table_of(rows, shape.axis)
            problems = [f"{label}: {line}" for line in rows.problems]
            for metric in missing:
                line = _line(label, table, metric, shape)
                # A file that could not be read may be readable next time.
                if not problems:
                    self._known.put((*base, metric), line)
                lines[metric] = line
        return {m: replace(line, label=label) for m, line in lines.items() if line}, problems


def _line(label: str, table: Table, metric: str, shape: Shape) -> Line:
    none = np.zeros(0)
    if metric not in table.present:
        return Line(label, none, none, none, [])
    whole = curve(table, metric, ~table.superseded)
    x, y = _drawn(whole, shape)
    earlier_x, earlier_y = _earlier(table, metric, shape) if shape.earlier else (none, none)
    return Line(label, x, y, whole.bad_x, whole.bad_words, earlier_x, earlier_y)


def _drawn(whole: Curve, shape: Shape) -> tuple[Array, Array]:
    return downsample(whole.x, smooth(whole.y, shape.smoothing), shape.buckets)


def _earlier(table: Table, metric: str, shape: Shape) -> tuple[Array, Array]:
    """The superseded rows of each attempt, one after the other, with a gap behind each."""
    gap = np.full(1, np.nan)
    xs, ys = [np.zeros(0)], [np.zeros(0)]
    for attempt in np.unique(table.attempt[table.superseded]):
        rows = table.superseded & (table.attempt == attempt)
        x, y = _drawn(curve(table, metric, rows), shape)
        xs += [x, gap]
        ys += [y, gap]
    return np.concatenate(xs), np.concatenate(ys)


def read(runs: Mapping[str, Run], metrics: Sequence[str], columns: ColumnReader) -> dict[str, Rows]:
    """All rows of the metrics by label, for `bands`."""
    names = [*metrics, *AXIS_NAMES]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda run: columns.rows(run.folder, names), runs.values())
        return dict(zip(runs, found, strict=True))


def bands(
    found: Mapping[str, Rows],
    groups: Mapping[str, Sequence[str]],
    metric: str,
    axis: Axis,
    smoothing: float,
) -> list[Band]:
    """Mean and spread of each group of labels; x reaches as far as its longest run does."""
    made = []
    for name, members in groups.items():
        wholes = []
        for label in members:
            table = table_of(found[label], axis)
            if metric in table.present:
                whole = curve(table, metric, ~table.superseded)
                if len(whole.x):
                    wholes.append((whole.x, smooth(whole.y, smoothing)))
        if wholes:
            made.append(_band(name, wholes))
    return made


def _band(label: str, wholes: Sequence[tuple[Array, Array]]) -> Band:
    ends = [float(x[-1]) for x, _ in wholes]
    grid_G = np.linspace(min(float(x[0]) for x, _ in wholes), max(ends), GRID)
    values_RG = np.stack([_means(x, y, grid_G) for x, y in wholes])
    # Between two runs that do not overlap there may be none.
    known_G = np.isfinite(values_RG).any(axis=0)
    grid_G, values_RG = grid_G[known_G], values_RG[:, known_G]
    step = grid_G[1] - grid_G[0] if len(grid_G) > 1 else 0.0
    return Band(
        label,
        len(wholes),
        grid_G,
        np.nanmean(values_RG, axis=0),
        np.nanmin(values_RG, axis=0),
        np.nanmax(values_RG, axis=0),
        shrinks=min(ends) < max(ends) - step,
    )


def _means(x: Array, y: Array, grid_G: Array) -> Array:
    """Mean of y around each grid point; between records, where there is none, on the line; before
    the first and after the last NaN.
    """
    half = (grid_G[1] - grid_G[0]) / 2 if len(grid_G) > 1 else 0.0
    first = np.searchsorted(x, grid_G - half, side="left")
    last = np.searchsorted(x, grid_G + half, side="right")
    sums = np.concatenate([[0.0], np.cumsum(y)])
    counts = last - first
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = (sums[last] - sums[first]) / counts
    return np.where(counts > 0, inside, np.interp(grid_G, x, y, left=np.nan, right=np.nan))


def group_of(run: Run, grouping: Grouping) -> str:
    """What runs must have in common to be one line: nothing, their group, or all but the seed."""
    if grouping == "run":
        return run.key
    if grouping == "group":
        return run.group or run.name
    return _settings_of(run)


def _settings_of(run: Run) -> str:
    config = dict(run.config)
    for section, setting in SEEDS:
        inside = config.get(section)
        if isinstance(inside, dict):
            config[section] = {name: value for name, value in inside.items() if name != setting}
    return repr(sorted(config.items()))


def groups(runs: Mapping[str, Run], grouping: Grouping) -> dict[str, list[str]]:
    """Labels by group. A group of several runs is called by their group, or by the first's name."""
    members: dict[str, list[str]] = {}
    for label, run in runs.items():
        members.setdefault(group_of(run, grouping), []).append(label)
    named: dict[str, list[str]] = {}
    for labels in members.values():
        first = runs[labels[0]]
        name = labels[0] if len(labels) == 1 else (first.group or first.name)
        while name in named:
            name += " ·"
        named[name] = labels
    return named


def labels(runs: Sequence[Run]) -> list[str]:
    """A label for each run: its name, with its key where names repeat."""
    names = [run.name for run in runs]
    return [f"{run.name} ({run.key})" if names.count(run.name) > 1 else run.name for run in runs]


def arrow(found: Sequence[Line]) -> pa.Table:
    """The drawn points as rows of run, x, y, and whether a later attempt did the step again."""
    parts = [(line.label, line.x, line.y, False) for line in found]
    parts += [(line.label, line.earlier_x, line.earlier_y, True) for line in found]
    table = pa.table(
        {
            "run": [label for label, x, _, _ in parts for _ in range(len(x))],
            "x": _joined([x for _, x, _, _ in parts]),
            "y": _joined([y for _, _, y, _ in parts]),
            "superseded": [earlier for _, x, _, earlier in parts for _ in range(len(x))],
        }
    )
    # Without the gaps between attempts.
    return table.filter(pa.array(np.isfinite(table["x"].to_numpy())))


def band_arrow(found: Sequence[Band]) -> pa.Table:
    """The bands as rows of group, x, mean, lowest and highest, for a download."""
    return pa.table(
        {
            "group": [band.label for band in found for _ in range(len(band.x))],
            "x": _joined([band.x for band in found]),
            "mean": _joined([band.mean for band in found]),
            "low": _joined([band.low for band in found]),
            "high": _joined([band.high for band in found]),
        }
    )


def _joined(parts: list[NDArray[np.float64]]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)
