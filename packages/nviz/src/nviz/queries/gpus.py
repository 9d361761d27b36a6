"""GPU readings over time: curves for a few ranks, a heat map for many, and the newest of each.

Letters: R ranks, B buckets of time. Curves keep the lowest and the highest reading of every bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[np.float64]

BUCKETS = 250
COLUMNS = 160
RECENT_S = 600.0


@dataclass(frozen=True, slots=True)
class Readings:
    """One rank's readings in order of time (seconds since the epoch)."""

    rank: int
    time_unix_s: Array
    value: Array


@dataclass(frozen=True, slots=True)
class ReadingMap:
    """Mean reading of each rank in each bucket of time, NaN for none: `value_RB`."""

    ranks: list[int]
    time_unix_s_B: Array
    value_RB: Array


@dataclass(frozen=True, slots=True)
class Latest:
    """A rank's newest readings, and its mean utilisation over the last ten minutes, in percent."""

    rank: int
    time_unix_s: float
    values: dict[str, float]
    recent_utilisation: float | None


def span(connection: duckdb.DuckDBPyConnection) -> tuple[list[int], list[str]]:
    """Ranks with readings, ascending, and names of the readings that some rank has."""
    ranks = [
        row[0]
        for row in connection.execute("SELECT DISTINCT rank FROM gpus ORDER BY rank").fetchall()
    ]
    names = _names(connection)
    counts = connection.execute(
        f"SELECT {', '.join(f'count({name})' for name in names)} FROM gpus"
    ).fetchall()[0]
    return ranks, [name for name, count in zip(names, counts, strict=True) if count]


def _names(connection: duckdb.DuckDBPyConnection) -> list[str]:
    described = connection.execute("DESCRIBE gpus").fetchall()
    return [name for name, *_ in described if name not in ("rank", "time_unix_s")]


def readings(
    connection: duckdb.DuckDBPyConnection, name: str, buckets: int = BUCKETS
) -> list[Readings]:
    """At most `2 * buckets` readings of `name` by rank: of each bucket the lowest and highest."""
    found = connection.execute(
        f"WITH known AS (SELECT rank, time_unix_s AS t, {name} AS v FROM gpus "
        f"WHERE isfinite({name})), "
        "span AS (SELECT min(t) AS first, max(t) AS last FROM known), "
        "placed AS (SELECT rank, t, v, least(floor((t - first) * ? "
        "/ greatest(last - first, 1e-9)), ? - 1) AS bucket FROM known, span), "
        "kept AS (SELECT rank, unnest([{'t': arg_min(t, v), 'v': min(v)}, "
        "{'t': arg_max(t, v), 'v': max(v)}], recursive := true) FROM placed "
        "GROUP BY rank, bucket) "
        "SELECT DISTINCT rank, t, v FROM kept ORDER BY rank, t",
        [buckets, buckets],
    ).fetchnumpy()
    ranks = np.asarray(found["rank"], dtype=np.int64)
    return [
        Readings(
            int(rank), np.asarray(found["t"])[ranks == rank], np.asarray(found["v"])[ranks == rank]
        )
        for rank in np.unique(ranks)
    ]


def reading_map(
    connection: duckdb.DuckDBPyConnection, name: str, columns: int = COLUMNS
) -> ReadingMap:
    """Means of `name` by rank over at most `columns` columns of equal time."""
    found = connection.execute(
        f"WITH known AS (SELECT rank, time_unix_s AS t, {name} AS v FROM gpus "
        f"WHERE isfinite({name})), "
        "span AS (SELECT min(t) AS first, max(t) AS last FROM known) "
        "SELECT rank, least(floor((t - first) * ? / greatest(last - first, 1e-9)), ? - 1) "
        "AS bucket, min(t) AS t, avg(v) AS v FROM known, span GROUP BY rank, bucket",
        [columns, columns],
    ).fetchnumpy()
    ranks, rows = np.unique(np.asarray(found["rank"], dtype=np.int64), return_inverse=True)
    buckets, places = np.unique(np.asarray(found["bucket"]), return_inverse=True)
    value_RB = np.full((len(ranks), len(buckets)), np.nan)
    value_RB[rows, places] = np.asarray(found["v"])
    times = np.full(len(buckets), np.inf)
    np.minimum.at(times, places, np.asarray(found["t"], dtype=np.float64))
    return ReadingMap(ranks.tolist(), times, value_RB)


def latest(connection: duckdb.DuckDBPyConnection, names: list[str]) -> list[Latest]:
    """The newest readings of every rank, by rank."""
    newest = "".join(f", arg_max({name}, time_unix_s)" for name in names)
    recent = (
        "avg(utilisation_percent) FILTER (isfinite(utilisation_percent) AND time_unix_s > "
        f"(SELECT max(time_unix_s) - {RECENT_S} FROM gpus))"
    )
    found = connection.execute(
        f"SELECT rank, max(time_unix_s), {recent}{newest} FROM gpus GROUP BY rank ORDER BY rank"
    ).fetchall()
    return [
        Latest(
            rank,
            time_unix_s,
            {name: value for name, value in zip(names, values, strict=True) if value is not None},
            mean,
        )
        for rank, time_unix_s, mean, *values in found
    ]


def readings_arrow(found: Sequence[Readings], name: str) -> pa.Table:
    """The drawn readings as rows of rank, time and value, for a download."""
    none = [np.zeros(0)]
    return pa.table(
        {
            "rank": [item.rank for item in found for _ in range(len(item.value))],
            "time_unix_s": np.concatenate([item.time_unix_s for item in found] or none),
            name: np.concatenate([item.value for item in found] or none),
        }
    )


def map_arrow(found: ReadingMap, name: str) -> pa.Table:
    """The means of a heat map as rows of rank, time and value, for a download."""
    rows, columns = np.nonzero(np.isfinite(found.value_RB))
    return pa.table(
        {
            "rank": np.array(found.ranks, dtype=np.int64)[rows],
            "time_unix_s": found.time_unix_s_B[columns],
            name: found.value_RB[rows, columns],
        }
    )
