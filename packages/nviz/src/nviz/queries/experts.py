"""Expert load: which expert of which layer got how much.

Letters: S step columns, L layers, E experts. A load of 1 is an even share: tokens of an expert
divided by the mean over the layer's experts. Counts of all ranks are added; rows that a later
attempt replaced are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from nviz.store.run_data import EXPERTS

Array = NDArray[np.float64]

DEAD_STEPS = 50
STARVED_BELOW = 0.1


@dataclass(frozen=True, slots=True)
class LoadMap:
    """Load of one layer over time: `load_ES` of each column's steps, `step_S` the first step of
    each.
    """

    step_S: NDArray[np.int64]
    load_ES: Array


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """Load of every layer at one step. A layer with fewer experts than others ends in NaN."""

    step: int
    layers: list[int]
    load_LE: Array


@dataclass(frozen=True, slots=True)
class Idle:
    """Experts of a layer with no token (dead) or below a tenth of an even share (starved)."""

    layer: int
    dead: list[int]
    starved: list[int]


def layers(connection: duckdb.DuckDBPyConnection) -> list[int]:
    """Numbers of the MoE layers, ascending; positions where a row gives no numbers."""
    found = connection.execute(
        "SELECT layers, len(load) FROM experts ORDER BY attempt DESC, step DESC, rank LIMIT 1"
    ).fetchall()
    return sorted(_numbers(*found[0])) if found else []


def _numbers(found: list[int] | None, count: int) -> list[int]:
    return list(found) if found and len(found) == count else list(range(count))


def load_map(connection: duckdb.DuckDBPyConnection, layer: int, columns: int = 200) -> LoadMap:
    """Load of `layer`'s experts over the steps, averaged into at most `columns` columns."""
    steps, counts_SE = _counts(connection, layer)
    if len(steps) == 0:
        return LoadMap(np.zeros(0, dtype=np.int64), np.zeros((0, 0)))
    edges = np.unique(np.linspace(0, len(steps), min(columns, len(steps)) + 1).astype(np.int64))
    sums_SE = np.add.reduceat(counts_SE, edges[:-1], axis=0)
    return LoadMap(steps[edges[:-1]], _relative(sums_SE).T)


def _counts(connection: duckdb.DuckDBPyConnection, layer: int) -> tuple[NDArray[np.int64], Array]:
    """Steps and tokens per expert of `layer`, ranks added."""
    position = "coalesce(list_position(layers, ?), CASE WHEN layers IS NULL THEN ? + 1 END)"
    found = connection.execute(
        f"SELECT step, load[{position}] AS row FROM ({EXPERTS}) ORDER BY step", [layer, layer]
    ).fetchall()
    return _summed(found)


def _recent(
    connection: duckdb.DuckDBPyConnection, last: int
) -> dict[int, tuple[NDArray[np.int64], Array]]:
    """Of each layer, the newest `last` steps and tokens per expert, ranks added."""
    found = connection.execute(
        f"WITH counted AS ({EXPERTS}) SELECT step, layers, load FROM counted WHERE step IN "
        "(SELECT DISTINCT step FROM counted ORDER BY step DESC LIMIT ?) ORDER BY step",
        [last],
    ).fetchall()
    rows: dict[int, list[tuple[int, list[float | None]]]] = defaultdict(list)
    for step, numbers, load in found:
        for layer, row in zip(_numbers(numbers, len(load)), load, strict=True):
            rows[layer].append((step, row))
    return {layer: _summed(rows[layer]) for layer in sorted(rows)}


def _summed(
    found: Sequence[tuple[int, list[float | None] | None]],
) -> tuple[NDArray[np.int64], Array]:
    """Steps and the sum of each step's rows; rows of an uncommon number of experts are left out."""
    sizes = Counter(len(row) for _, row in found if row)
    if not sizes:
        return np.zeros(0, dtype=np.int64), np.zeros((0, 0))
    width = sizes.most_common(1)[0][0]
    total: dict[int, Array] = defaultdict(lambda: np.zeros(width))
    for step, row in found:
        if row and len(row) == width:
            total[step] += np.nan_to_num(np.array(row, dtype=np.float64))
    return np.array(list(total), dtype=np.int64), np.stack(list(total.values()))


def _relative(counts: Array) -> Array:
    """Counts divided by the mean over the last axis (E); NaN where no token was routed."""
    mean = counts.mean(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(mean > 0, counts / mean, np.nan)


def last_loads(connection: duckdb.DuckDBPyConnection) -> LayerLoads | None:
    """Load of all layers at the newest recorded step, or None before the first."""
    newest = {layer: found for layer, found in _recent(connection, 1).items() if len(found[0])}
    if not newest:
        return None
    width = max(counts_SE.shape[1] for _, counts_SE in newest.values())
    load_LE = np.full((len(newest), width), np.nan)
    for i, (_, counts_SE) in enumerate(newest.values()):
        load_LE[i, : counts_SE.shape[1]] = _relative(counts_SE)[-1]
    step = max(int(steps[-1]) for steps, _ in newest.values())
    return LayerLoads(step, list(newest), load_LE)


def idle_experts(
    connection: duckdb.DuckDBPyConnection, last: int = DEAD_STEPS
) -> tuple[int, list[Idle]]:
    """How many of the `last` recorded steps there were, and the layers with idle experts."""
    looked_at, found = 0, []
    for layer, (steps, counts_SE) in _recent(connection, last).items():
        looked_at = max(looked_at, len(steps))
        load_E = _relative(counts_SE.sum(axis=0))
        dead = np.flatnonzero(load_E == 0).tolist()
        starved = np.flatnonzero((load_E > 0) & (load_E < STARVED_BELOW)).tolist()
        if dead or starved:
            found.append(Idle(layer, dead, starved))
    return looked_at, found
