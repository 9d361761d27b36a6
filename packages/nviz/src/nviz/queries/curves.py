"""Curves of a run's metrics: which rows count, the x axis, smoothing, down-sampling, non-finite
values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nviz.store.columns import Rows
from nviz.store.events import Event
from nviz.store.parse import non_finite_word, number

Array = NDArray[np.float64]
Axis = Literal["step", "tokens", "time"]

BUCKETS = 500
VALIDATION = "loss/validation"
AXIS_COLUMNS: dict[Axis, str] = {"step": "step", "tokens": "tokens", "time": "time_unix_s"}


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equal length, ordered by attempt and step. A metric's NaN may be a recorded NaN or
    a missing value: `present` tells them apart."""

    step: Array
    x: Array
    attempt: NDArray[np.int64]
    superseded: NDArray[np.bool_]
    values: dict[str, Array]
    present: dict[str, NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line to draw: finite points in order of x. `bad` are the places of non-finite values, and
    `bad_words` what was recorded there."""

    x: Array
    y: Array
    bad_x: Array
    bad_step: Array
    bad_words: list[str]


def table_of(rows: Rows, axis: Axis = "step") -> Table:
    """The columns of a run with x along `axis`; rows without an x are left out. Time is in seconds
    from the run's first record.
    """
    x = _x_of(rows, axis)
    keep = np.isfinite(x)
    return Table(
        step=rows.step.astype(np.float64)[keep],
        x=x[keep],
        attempt=rows.attempt[keep],
        superseded=rows.superseded[keep],
        values={name: column.values[keep] for name, column in rows.columns.items()},
        present={name: column.present[keep] for name, column in rows.columns.items()},
    )


def _x_of(rows: Rows, axis: Axis) -> Array:
    if axis == "step":
        return rows.step.astype(np.float64)
    column = rows.columns.get(AXIS_COLUMNS[axis])
    if column is None:
        return np.full(len(rows.step), np.nan)
    if axis == "tokens":
        return column.values
    finite = column.values[np.isfinite(column.values)]
    return column.values - finite.min() if len(finite) else column.values


def evaluations(events: Iterable[Event]) -> dict[int, float]:
    """`loss/validation` of the evaluation events by step, without those that a later attempt,
    resumed before them, has left behind.
    """
    found: dict[int, float] = {}
    for item in events:
        if item.step is None:
            continue
        loss = number(item.detail.get(VALIDATION))
        if item.event == "resume":
            found = {known: value for known, value in found.items() if known <= item.step}
        elif item.event == "eval" and loss is not None:
            found[item.step] = loss
    return found


def with_evaluations(found: Table, losses: dict[int, float], axis: Axis) -> Table:
    """`found` with a row for each evaluation whose loss no record holds; x between the records'."""
    counts = ~found.superseded
    if not counts.any():
        return found
    values = {VALIDATION: np.full(len(found.step), np.nan)} | found.values
    present = {VALIDATION: np.zeros(len(found.step), dtype=np.bool_)} | found.present
    known = set(found.step[counts & present[VALIDATION]].tolist())
    steps = np.array([step for step in sorted(losses) if step not in known], dtype=np.float64)
    order = np.argsort(found.step[counts], kind="stable")
    between = np.interp(steps, found.step[counts][order], found.x[counts][order])
    more = np.array([losses[int(step)] for step in steps])
    none = np.full(len(steps), np.nan)
    return Table(
        step=np.append(found.step, steps),
        x=np.append(found.x, steps if axis == "step" else between),
        attempt=np.append(found.attempt, np.full(len(steps), found.attempt.max())),
        superseded=np.append(found.superseded, np.zeros(len(steps), dtype=np.bool_)),
        values={n: np.append(v, more if n == VALIDATION else none) for n, v in values.items()},
        present={n: np.append(p, np.full(len(steps), n == VALIDATION)) for n, p in present.items()},
    )


def curve(found: Table, metric: str, rows: NDArray[np.bool_]) -> Curve:
    """The curve of `metric` over the chosen rows."""
    chosen = rows & found.present[metric]
    y, x, step = found.values[metric][chosen], found.x[chosen], found.step[chosen]
    order = np.argsort(x, kind="stable")
    y, x, step = y[order], x[order], step[order]
    bad = ~np.isfinite(y)
    words = [word for value in y[bad].tolist() if (word := non_finite_word(value))]
    return Curve(x[~bad], y[~bad], x[bad], step[bad], words)


def smooth(y: Array, weight: float) -> Array:
    """Exponential moving average with the start's bias taken out; `weight` 0 leaves `y` as it is.

    With weight w the average after n values is sum(w^(n-i) y_i) / sum(w^(n-i)). The sums double
    the number of values that they reach over in each pass. `y` is finite.
    """
    if weight <= 0.0 or len(y) == 0:
        return y
    total, reach, factor = y.astype(np.float64), 1, weight
    while reach < len(y) and factor > 1e-18:
        total[reach:] += factor * total[:-reach]
        reach, factor = 2 * reach, factor * factor
    return np.asarray(total * (1.0 - weight) / (1.0 - weight ** np.arange(1, len(y) + 1)))


def downsample(x: Array, y: Array, buckets: int = BUCKETS) -> tuple[Array, Array]:
    """At most `2 * buckets + 2` points of a curve, in order, spikes kept.

    The points are cut into buckets of equal count; each gives its lowest and its highest point. The
    first and the last point stay. `y` is finite.
    """
    n = len(y)
    if n <= 2 * buckets + 2:
        return x, y
    edges = np.linspace(0, n, buckets + 1).astype(np.int64)
    keep = {0, n - 1}
    for start, end in pairwise(edges.tolist()):
        piece = y[start:end]
        keep.add(start + int(piece.argmin()))
        keep.add(start + int(piece.argmax()))
    marks = np.array(sorted(keep))
    return x[marks], y[marks]


def latest_of(found: Table, metrics: Sequence[str]) -> dict[str, float]:
    """The newest recorded value of each of `metrics` that `found` has; it may be non-finite."""
    newest = {}
    for name in metrics:
        if name not in found.present:
            continue
        rows = np.flatnonzero(found.present[name] & ~found.superseded)
        if len(rows):
            row = rows[np.argmax(found.step[rows])]
            newest[name] = float(found.values[name][row])
    return newest


def last_step_of(rows: Rows) -> int | None:
    """The newest step of the newest attempt, or None before the first record."""
    if len(rows.step) == 0:
        return None
    return int(rows.step[rows.attempt == rows.attempt.max()].max())


def arrow(found: Table) -> pa.Table:
    """All values, a row a step, for a download: null where none was recorded."""
    columns = {
        "step": found.step.astype(np.int64),
        "x": found.x,
        "attempt": found.attempt,
        "superseded": found.superseded,
    }
    metrics = {
        name: pa.array(found.values[name], mask=~found.present[name]) for name in found.values
    }
    return pa.table(columns | metrics)
