"""Where a step's time goes, and which rank takes longest.

Letters: N rows, P stages, B buckets of steps, R ranks, S steps. Stages run one after another, but
those in `INNER` run inside forward and backward, so the two kinds are stacked apart. A bucket's
value is the mean over its steps: means still add up, which minima and maxima would not. Steps that
a later attempt did again are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nviz.store.columns import Rows

Array = NDArray[np.float64]

PREFIX = "time_ms/"
STEP_MS = "step_ms"
ORDER = ("data", "forward", "backward", "optimizer")
INNER = ("dispatch", "expert", "combine")
WAIT = "rdep/wait_ms"
EXCHANGE = (PREFIX + "dispatch", PREFIX + "combine")
OWN_MS = "own_ms"
# What `own_ms` needs.
OWN = (OWN_MS, STEP_MS, WAIT, *EXCHANGE)
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


def peers_of(metrics: Iterable[str]) -> list[int]:
    """The peers that waiting was recorded for, ascending."""
    ends = [name.removeprefix(f"{WAIT}/") for name in metrics if name.startswith(f"{WAIT}/")]
    return sorted(int(end) for end in ends if end.isdecimal())


def own_ms(rows: Rows) -> Array:
    """A rank's own milliseconds in each row (N): of `step_ms` what is not waiting for others.

    Every rank of a synchronous step ends it together, so `step_ms` is much the same on all. The
    trainer knows best where it waited and records `own_ms`; of a run without it, waiting for the
    exchange is taken off, or all of dispatch and combine where that was not recorded. NaN where
    there is none.
    """
    if OWN_MS in rows.columns:
        own = rows.columns[OWN_MS].values
        return np.where(np.isfinite(own), own, np.nan)
    if STEP_MS not in rows.columns:
        return np.full(len(rows.step), np.nan)
    own = rows.columns[STEP_MS].values.copy()
    for name in [WAIT] if WAIT in rows.columns else EXCHANGE:
        if name in rows.columns:
            waited = rows.columns[name]
            own -= np.where(waited.present, waited.values, 0.0)
    return np.where(np.isfinite(own), own, np.nan)


def stage_times(
    rows: Rows, stages: Sequence[str], rest: bool, buckets: int = BUCKETS
) -> StageTimes:
    """Mean time of `stages` of one rank over at most `buckets` buckets of equally many steps.

    With `rest`, what of `step_ms` no stage explains is one more stage.
    """
    count = np.flatnonzero(~rows.superseded)
    pieces = [piece for piece in np.array_split(count, buckets) if len(piece)]
    starts = np.array([piece[0] for piece in pieces], dtype=np.int64)
    wanted = [PREFIX + name for name in stages] + [STEP_MS] * rest
    values = np.array([_means(rows, name, pieces) for name in wanted]).reshape(-1, len(pieces))
    names = list(stages)
    if rest:
        left = values[-1] - np.nansum(values[:-1], axis=0)
        values = np.vstack([values[:-1], np.maximum(left, 0.0)])
        names.append(REST)
    return StageTimes(names, rows.step[starts], values)


def _means(rows: Rows, name: str, pieces: list[NDArray[np.intp]]) -> list[float]:
    """Mean of a metric's finite values in each piece, NaN where there is none."""
    if name not in rows.columns:
        return [np.nan] * len(pieces)
    values = rows.columns[name].values
    finite = [(chosen := values[piece])[np.isfinite(chosen)] for piece in pieces]
    return [float(found.mean()) if len(found) else np.nan for found in finite]


def rank_times(
    found: Iterable[tuple[int, Rows]], span: tuple[int, int], columns: int = COLUMNS
) -> RankTimes:
    """Each rank's own step time over at most `columns` columns of equally many steps from the
    first to the last of `span`. The ranks are gone through one by one, as they may be many.
    """
    first, last = span
    ranks, rows_RB = [], []
    steps = np.full(columns, np.iinfo(np.int64).max)
    for rank, rows in found:
        own = own_ms(rows)
        known = np.isfinite(own) & ~rows.superseded
        step, ms = rows.step[known], own[known]
        if not len(step):
            continue
        bucket = np.clip((step - first) * columns // max(last - first, 1), 0, columns - 1)
        counts = np.bincount(bucket, minlength=columns)
        with np.errstate(invalid="ignore"):
            rows_RB.append(np.bincount(bucket, weights=ms, minlength=columns) / counts)
        np.minimum.at(steps, bucket, step)
        ranks.append(rank)
    ms_RB = np.array(rows_RB, dtype=np.float64).reshape(len(ranks), columns)
    filled = np.isfinite(ms_RB).any(axis=0)
    return RankTimes(ranks, steps[filled], _over_median(ms_RB[:, filled]))


def _over_median(ms_RB: Array) -> Array:
    """Divided by the median over ranks (axis 0); NaN where that is 0 or no rank has a value."""
    if not ms_RB.size:
        return ms_RB
    with np.errstate(invalid="ignore", divide="ignore"):
        median = np.ma.median(np.ma.masked_invalid(ms_RB), axis=0)
        return np.asarray(np.ma.filled(np.ma.masked_invalid(ms_RB) / median, np.nan))


def rank_table(found: RankTimes) -> pa.Table:
    """A row a step column, a column a rank, for a download."""
    rows = zip(found.ranks, found.relative_RB, strict=True)
    return pa.table({"step": found.step_B} | {f"rank {rank}": row_B for rank, row_B in rows})


def rank_speeds(found: Mapping[int, Rows], last: int = RECENT_STEPS) -> list[RankSpeed]:
    """Ranks by their own time over the newest `last` steps, the slowest first."""
    recent = {
        rank: _recent(rows, own_ms(rows), _newest(found), last) for rank, rows in found.items()
    }
    recent = {rank: ms_S for rank, ms_S in recent.items() if np.isfinite(ms_S).any()}
    if not recent:
        return []
    ms_RS = np.array(list(recent.values()))
    slowest_RS = ms_RS == np.fmax.reduce(ms_RS, axis=0)
    means = np.nanmean(ms_RS, axis=1)
    median = float(np.median(means))
    speeds = [
        RankSpeed(
            rank,
            float(mean),
            float(mean) / median if median > 0 else float("nan"),
            float(slowest_S[np.isfinite(ms_S)].mean()),
        )
        for rank, mean, slowest_S, ms_S in zip(recent, means, slowest_RS, ms_RS, strict=True)
    ]
    return sorted(speeds, key=lambda item: (-item.mean_ms, item.rank))


def peer_waits(found: Mapping[int, Rows], last: int = RECENT_STEPS) -> PeerWaits | None:
    """How long each rank waits for each peer of its expert group, over the newest `last` steps;
    None where that is not recorded.
    """
    peers = peers_of({name for rows in found.values() for name in rows.columns})
    if not peers:
        return None
    newest = _newest(found)
    ms_RR = np.full((len(found), len(peers)), np.nan)
    for at, rows in enumerate(found.values()):
        for place, peer in enumerate(peers):
            if column := rows.columns.get(f"{WAIT}/{peer}"):
                ms_S = _recent(rows, column.values, newest, last)
                ms_S = ms_S[np.isfinite(ms_S)]
                ms_RR[at, place] = ms_S.mean() if len(ms_S) else np.nan
    return PeerWaits(list(found), peers, ms_RR)


def _newest(found: Mapping[int, Rows]) -> int:
    """The newest step of any rank that counts."""
    steps = [rows.step[~rows.superseded] for rows in found.values()]
    return max((int(step.max()) for step in steps if len(step)), default=0)


def _recent(rows: Rows, values: Array, newest: int, last: int) -> Array:
    """Values of the `last` steps up to `newest` (S), NaN where there is none."""
    found_S = np.full(last, np.nan)
    at = rows.step - (newest - last + 1)
    chosen = (at >= 0) & ~rows.superseded
    found_S[at[chosen]] = values[chosen]
    return found_S
