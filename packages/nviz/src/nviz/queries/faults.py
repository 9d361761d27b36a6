"""What happened to a run: its attempts, the steps they lost, and a time line of its events.

An attempt that begins after step f while the one before it had reached step r loses r - f steps. A
recovery inside an attempt (survivors go on without a restart) says itself how many steps it lost.
"""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from nviz.store import Run
from nviz.store.parse import number, step_number

Array = NDArray[np.float64]

# Lane of the time line by event; what is not here stands in the lane "other".
LANES = {
    "fault": "fault",
    "recovery": "recovery",
    "alert": "alert",
    "start": "start, resume",
    "resume": "start, resume",
    "checkpoint": "checkpoint",
    "eval": "evaluation",
    "end": "end",
}
OTHER = "other"
DIED = "died"
LANE_ORDER = (*dict.fromkeys(LANES.values()), OTHER)
MOST_MOMENTS = 400
PROGRESS_BUCKETS = 250


@dataclass(frozen=True, slots=True)
class Moment:
    """An event of the time line: when (seconds since the epoch), its lane, step and words."""

    time_unix_s: float
    lane: str
    step: int | None
    words: str


@dataclass(frozen=True, slots=True)
class History:
    """One attempt. `reached` is its last recorded step, `lost` the steps that the next one had to
    do again (None for the last), `ended` how it ended: its status, or "died" without a word."""

    attempt: int
    started_unix_s: float | None
    from_step: int
    reached: int | None
    last_unix_s: float | None
    ended: str
    lost: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps of one attempt over time, thinned: equal lengths, in order of time."""

    attempt: int
    time_unix_s: Array
    step: Array


def lane_counts(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """How many events each lane has, in the order of the lanes."""
    counts = dict.fromkeys(LANE_ORDER, 0)
    for event, count in connection.execute(
        "SELECT event, count(*) FROM events GROUP BY event"
    ).fetchall():
        counts[LANES.get(event, OTHER)] += count
    return {lane: count for lane, count in counts.items() if count}


def moments(connection: duckdb.DuckDBPyConnection, most: int = MOST_MOMENTS) -> list[Moment]:
    """Events in order of time, at most about `most` of a kind: evenly thinned, both ends kept."""
    found = connection.execute(
        "WITH placed AS (SELECT *, row_number() OVER (PARTITION BY event ORDER BY seq) AS n, "
        "count(*) OVER (PARTITION BY event) AS total FROM events WHERE isfinite(time_unix_s)) "
        "SELECT time_unix_s, event, step, detail FROM placed "
        "WHERE total <= ? OR n % (total // ?) = 0 OR n = 1 OR n = total ORDER BY time_unix_s, seq",
        [most, most],
    ).fetchall()
    return [
        Moment(when, LANES.get(event, OTHER), step, words(event, json.loads(detail)))
        for when, event, step, detail in found
    ]


def words(event: str, detail: dict[str, Any]) -> str:
    """An event in words: its name and the fields it came with, at most 300 characters."""
    what = detail.get("what")
    rest = {key: item for key, item in detail.items() if key != "what"}
    parts = [f"{event}: {what}" if what else event]
    parts += [f"{key} {_plain(item)}" for key, item in sorted(rest.items())]
    return ", ".join(parts)[:300]


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)


def histories(run: Run, connection: duckdb.DuckDBPyConnection, metrics: list[str]) -> list[History]:
    """The run's attempts, the first one first, from run.json, the events and the records."""
    when = "max(time_unix_s)" if "time_unix_s" in metrics else "NULL"
    recorded = {
        attempt: (first, last, last_s)
        for attempt, first, last, last_s in connection.execute(
            f"SELECT attempt, min(step), max(step), {when} FROM rows GROUP BY attempt"
        ).fetchall()
    }
    begun = {attempt.number: attempt for attempt in run.attempts}
    ends = _ends(connection, [attempt.number for attempt in run.attempts])
    found = []
    for attempt in sorted(recorded.keys() | begun.keys()):
        first, last, last_s = recorded.get(attempt, (None, None, None))
        known = begun.get(attempt)
        from_step = known.from_step if known else None
        found.append(
            History(
                attempt=attempt,
                started_unix_s=known.started_unix_s if known else None,
                from_step=from_step if from_step is not None else max((first or 1) - 1, 0),
                reached=last,
                last_unix_s=last_s,
                ended=ends.get(attempt, DIED),
            )
        )
    return _with_losses(found, run)


def _ends(connection: duckdb.DuckDBPyConnection, numbers: list[int]) -> dict[int, str]:
    """Status in the event `end` of each attempt; the n-th start or resume begins the n-th attempt,
    counted from the newest, as a lost line is most likely an old one."""
    rows = connection.execute(
        "SELECT event, detail FROM events WHERE event IN ('start', 'resume', 'end') ORDER BY seq"
    ).fetchall()
    statuses: list[str | None] = []
    for event, detail in rows:
        if event != "end":
            statuses.append(None)
        elif statuses:
            statuses[-1] = str(json.loads(detail).get("status", "ended"))[:40]
    numbers = numbers or list(range(1, len(statuses) + 1))
    pairs = zip(reversed(numbers), reversed(statuses), strict=False)
    return {attempt: status for attempt, status in pairs if status is not None}


def _with_losses(found: list[History], run: Run) -> list[History]:
    done = []
    for at, item in enumerate(found):
        if at + 1 == len(found):
            # The status is written before the event, and says more than a lost event.
            ended = item.ended if item.ended != DIED and not run.is_live else run.status
            done.append(replace(item, ended=ended))
        else:
            reached = item.from_step if item.reached is None else item.reached
            done.append(replace(item, lost=max(0, reached - found[at + 1].from_step)))
    return done


@dataclass(frozen=True, slots=True)
class Losses:
    """What faults cost: steps lost by restarts, those that recoveries say they lost, and seconds
    from each fault until training went on, where a recovery says so."""

    restarts: int
    recoveries: int
    seconds: tuple[float, ...]


def losses(connection: duckdb.DuckDBPyConnection, attempts: list[History]) -> Losses:
    """What faults cost the run. A recovery that goes on where an attempt began is that attempt's:
    its steps count once."""
    found = connection.execute(
        "SELECT step, detail FROM events WHERE event = 'recovery' ORDER BY seq"
    ).fetchall()
    details = [json.loads(detail) for _, detail in found]
    begun = {item.from_step for item in attempts[1:]}
    inside = [detail for (step, _), detail in zip(found, details, strict=True) if step not in begun]
    return Losses(
        restarts=sum(item.lost or 0 for item in attempts),
        recoveries=sum(step_number(detail.get("steps_lost")) or 0 for detail in inside),
        seconds=tuple(
            value
            for detail in details
            if (value := number(detail.get("seconds"))) is not None and math.isfinite(value)
        ),
    )


def progress(
    connection: duckdb.DuckDBPyConnection, metrics: list[str], buckets: int = PROGRESS_BUCKETS
) -> list[Progress]:
    """Step over time by attempt, of its lowest rank, at most `2 * buckets` points each."""
    if "time_unix_s" not in metrics:
        return []
    found = connection.execute(
        "WITH lowest AS (SELECT attempt, min(rank) AS rank FROM rows GROUP BY attempt), "
        "known AS (SELECT attempt, time_unix_s AS t, step FROM rows SEMI JOIN lowest "
        "USING (attempt, rank) WHERE isfinite(time_unix_s)), "
        "placed AS (SELECT *, ntile(?) OVER (PARTITION BY attempt ORDER BY t) AS bucket "
        "FROM known), "
        "kept AS (SELECT attempt, unnest([{'t': min(t), 's': arg_min(step, t)}, "
        "{'t': max(t), 's': arg_max(step, t)}], recursive := true) FROM placed "
        "GROUP BY attempt, bucket) "
        "SELECT DISTINCT attempt, t, s FROM kept ORDER BY attempt, t",
        [buckets],
    ).fetchnumpy()
    attempts = np.asarray(found["attempt"], dtype=np.int64)
    times = np.asarray(found["t"], dtype=np.float64)
    steps = np.asarray(found["s"], dtype=np.float64)
    return [
        Progress(int(attempt), times[attempts == attempt], steps[attempts == attempt])
        for attempt in np.unique(attempts)
    ]
