"""Where a step's time goes, and which rank takes longest.

Letters: P stages, B buckets of steps, R ranks. Stages run one after another, but those in `INNER`
run inside forward and backward, so the two kinds are stacked apart. A bucket's value is the mean
over its steps: means still add up, which minima and maxima would not. Steps that a later attempt
did again are left out.
"""

from dataclasses import dataclass

import duckdb
import numpy as np
from numpy.typing import NDArray

from nviz.store.run_data import ROWS, quoted

Array = NDArray[np.float64]

PREFIX = "time_ms/"
ORDER = ("data", "forward", "backward", "optimizer")
INNER = ("dispatch", "expert", "combine")
WAIT = "rdep/wait_ms"
REST = "rest of the step"
MOST_STAGES = 12
BUCKETS = 240
COLUMNS = 160
RECENT_STEPS = 200


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Mean milliseconds of each stage: `ms_PB`, `step_B` the first step of each bucket."""

    stages: list[str]
    step_B: NDArray[np.int64]
    ms_PB: Array

    def share(self, stage: str) -> float:
        """Part of all the time that `stage` takes, NaN if there is none."""
        total = float(np.nansum(self.ms_PB))
        at = self.stages.index(stage)
        return float(np.nansum(self.ms_PB[at])) / total if total > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Step time of each rank over steps, divided by the ranks' median: `relative_RB`."""

    ranks: list[int]
    step_B: NDArray[np.int64]
    relative_RB: Array


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """A rank over the newest steps: its mean time, that over the ranks' median, and the share of
    steps in which it was the slowest."""

    rank: int
    mean_ms: float
    relative: float
    slowest: float


@dataclass(frozen=True, slots=True)
class PeerWaits:
    """Mean milliseconds of a step that a rank (first axis) waits for a peer (second): `ms_RR`."""

    ranks: list[int]
    peers: list[int]
    ms_RR: Array


def stage_names(metrics: list[str]) -> tuple[list[str], list[str]]:
    """The run's stages one after another, and those inside forward and backward."""
    found = [name.removeprefix(PREFIX) for name in metrics if name.startswith(PREFIX)]
    known = [name for name in ORDER if name in found]
    others = [name for name in found if name not in ORDER and name not in INNER]
    return (known + others)[:MOST_STAGES], [name for name in INNER if name in found]


def work_metrics(metrics: list[str]) -> str:
    """SQL of a rank's own milliseconds in a step: of `step_ms` what is not waiting for others.

    Every rank of a synchronous step ends it together, so `step_ms` is much the same on all. Where
    the exchange did not record its waiting, all of dispatch and combine counts as such.
    """
    exchange = [PREFIX + "dispatch", PREFIX + "combine"]
    waits = [name for name in ([WAIT] if WAIT in metrics else exchange) if name in metrics]
    minus = "".join(f" - coalesce({quoted(name)}, 0)" for name in waits)
    return f"({quoted('step_ms')}{minus})"


def peer_waits(
    connection: duckdb.DuckDBPyConnection, metrics: list[str], last: int = RECENT_STEPS
) -> PeerWaits | None:
    """How long each rank waits for each peer of its expert group, over the newest `last` steps;
    None where that is not recorded.
    """
    peers = sorted(
        int(name.removeprefix(f"{WAIT}/"))
        for name in metrics
        if name.startswith(f"{WAIT}/") and name.removeprefix(f"{WAIT}/").isdecimal()
    )
    if not peers:
        return None
    means = ", ".join(f"avg({_finite(f'{WAIT}/{peer}')})" for peer in peers)
    found = connection.execute(
        f"SELECT rank, {means} FROM ({ROWS}) "
        "WHERE NOT superseded AND step > (SELECT max(step) - ? FROM rows) "
        "GROUP BY rank ORDER BY rank",
        [last],
    ).fetchall()
    ms_RR = np.array([row[1:] for row in found], dtype=np.float64).reshape(len(found), len(peers))
    return PeerWaits([row[0] for row in found], peers, ms_RR)


def stage_times(
    connection: duckdb.DuckDBPyConnection,
    rank: int,
    stages: list[str],
    rest: bool,
    buckets: int = BUCKETS,
) -> StageTimes:
    """Mean time of `stages` of one rank over at most `buckets` buckets of equally many steps.

    With `rest`, what of `step_ms` no stage explains is one more stage.
    """
    means = "".join(f", avg({_finite(PREFIX + name)})" for name in stages)
    whole = f", avg({_finite('step_ms')})" if rest else ""
    found = connection.execute(
        f"WITH counted AS (SELECT * FROM ({ROWS}) WHERE rank = ? AND NOT superseded), "
        "placed AS (SELECT *, ntile(?) OVER (ORDER BY step) AS bucket FROM counted) "
        f"SELECT min(step){means}{whole} FROM placed GROUP BY bucket ORDER BY bucket",
        [rank, buckets],
    ).fetchall()
    values = np.array([row[1:] for row in found], dtype=np.float64).reshape(len(found), -1).T
    names = list(stages)
    if rest:
        left = values[-1] - np.nansum(values[:-1], axis=0)
        values = np.vstack([values[:-1], np.maximum(left, 0.0)])
        names.append(REST)
    return StageTimes(names, np.array([row[0] for row in found], dtype=np.int64), values)


def rank_times(
    connection: duckdb.DuckDBPyConnection, metrics: list[str], columns: int = COLUMNS
) -> RankTimes:
    """Each rank's own step time over at most `columns` columns of equally many steps."""
    found = connection.execute(
        f"WITH counted AS (SELECT rank, step, {work_metrics(metrics)} AS ms FROM ({ROWS}) "
        "WHERE NOT superseded), "
        "span AS (SELECT min(step) AS first, max(step) AS last FROM counted), "
        "placed AS (SELECT rank, step, ms, "
        "least((step - first) * ? // greatest(last - first, 1), ? - 1) AS bucket "
        "FROM counted, span WHERE isfinite(ms)) "
        "SELECT rank, bucket, min(step) AS step, avg(ms) AS ms FROM placed GROUP BY rank, bucket",
        [columns, columns],
    ).fetchnumpy()
    ranks, rows = np.unique(np.asarray(found["rank"], dtype=np.int64), return_inverse=True)
    buckets, places = np.unique(np.asarray(found["bucket"], dtype=np.int64), return_inverse=True)
    ms_RB = np.full((len(ranks), len(buckets)), np.nan)
    ms_RB[rows, places] = np.asarray(found["ms"], dtype=np.float64)
    steps = np.full(len(buckets), np.iinfo(np.int64).max)
    np.minimum.at(steps, places, np.asarray(found["step"], dtype=np.int64))
    return RankTimes(ranks.tolist(), steps, _over_median(ms_RB))


def _over_median(ms_RB: Array) -> Array:
    """Divided by the median over ranks (axis 0); NaN where that is 0 or no rank has a value."""
    if not ms_RB.size:
        return ms_RB
    with np.errstate(invalid="ignore", divide="ignore"):
        median = np.ma.median(np.ma.masked_invalid(ms_RB), axis=0)
        return np.ma.filled(np.ma.masked_invalid(ms_RB) / median, np.nan)


def rank_speeds(
    connection: duckdb.DuckDBPyConnection, metrics: list[str], last: int = RECENT_STEPS
) -> list[RankSpeed]:
    """Ranks by their own time over the newest `last` steps, the slowest first."""
    found = connection.execute(
        f"WITH recent AS (SELECT rank, step, {work_metrics(metrics)} AS ms FROM ({ROWS}) "
        "WHERE NOT superseded AND step > (SELECT max(step) - ? FROM rows)), "
        "ordered AS (SELECT rank, ms, ms = max(ms) OVER (PARTITION BY step) AS slowest "
        "FROM recent WHERE isfinite(ms)) "
        "SELECT rank, avg(ms), avg(slowest::INT) FROM ordered GROUP BY rank ORDER BY 2 DESC, rank",
        [last],
    ).fetchall()
    if not found:
        return []
    median = float(np.median([mean for _, mean, _ in found]))
    return [
        RankSpeed(rank, mean, mean / median if median > 0 else float("nan"), slowest)
        for rank, mean, slowest in found
    ]


def _finite(name: str) -> str:
    """SQL of a metric, NULL where it is not finite, so that one NaN does not spoil a mean."""
    return f"CASE WHEN isfinite({quoted(name)}) THEN {quoted(name)} END"
