"""What happened to a run: its attempts, the steps they lost, and a time line of its events.

An attempt that begins after step f while the one before it had reached step r loses r - f steps. A
recovery inside an attempt (survivors go on without a restart) says itself how many steps it lost.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nviz.store import Event, Rows, Run
from nviz.store.parse import finite, step_number

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
TIME = "time_unix_s"
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


def lane_counts(events: Sequence[Event]) -> dict[str, int]:
    """How many events each lane has, in the order of the lanes."""
    counts = Counter(LANES.get(item.event, OTHER) for item in events)
    return {lane: counts[lane] for lane in LANE_ORDER if counts[lane]}


def moments(events: Sequence[Event], most: int = MOST_MOMENTS) -> list[Moment]:
    """Events in order of time, at most about `most` of a kind: evenly thinned, both ends kept."""
    kinds: dict[str, list[tuple[float, int, Event]]] = {}
    for at, item in enumerate(events):
        if item.time_unix_s is not None and math.isfinite(item.time_unix_s):
            kinds.setdefault(item.event, []).append((item.time_unix_s, at, item))
    kept = []
    for found in kinds.values():
        every = max(1, len(found) // most)
        kept += [*found[:-1:every], found[-1]]
    return [
        Moment(when, LANES.get(item.event, OTHER), item.step, words(item.event, item.detail))
        for when, _, item in sorted(kept, key=lambda entry: entry[:2])
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


def histories(run: Run, events: Sequence[Event], rows: Rows) -> list[History]:
    """The run's attempts, the first one first, from run.json, the events and the records; `rows`
    has the column `time_unix_s`.
    """
    recorded = _recorded(rows)
    begun = {attempt.number: attempt for attempt in run.attempts}
    ends = _ends(events, [attempt.number for attempt in run.attempts])
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


def _recorded(rows: Rows) -> dict[int, tuple[int, int, float | None]]:
    """First and last step and last time of each attempt that recorded something."""
    found = {}
    for attempt in np.unique(rows.attempt).tolist():
        chosen = rows.attempt == attempt
        step = rows.step[chosen]
        times = _times(rows)[chosen]
        times = times[np.isfinite(times)]
        last_s = float(times.max()) if len(times) else None
        found[attempt] = (int(step.min()), int(step.max()), last_s)
    return found


def _times(rows: Rows) -> Array:
    column = rows.columns.get(TIME)
    return column.values if column else np.full(len(rows.step), np.nan)


def _ends(events: Sequence[Event], numbers: list[int]) -> dict[int, str]:
    """Status in the event `end` of each attempt; the n-th start or resume begins the n-th attempt,
    counted from the newest, as a lost line is most likely an old one."""
    statuses: list[str | None] = []
    for item in events:
        if item.event in ("start", "resume"):
            statuses.append(None)
        elif item.event == "end" and statuses:
            statuses[-1] = str(item.detail.get("status", "ended"))[:40]
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


def losses(events: Sequence[Event], attempts: list[History]) -> Losses:
    """What faults cost the run. A recovery that goes on where an attempt began is that attempt's:
    its steps count once."""
    found = [item for item in events if item.event == "recovery"]
    begun = {item.from_step for item in attempts[1:]}
    inside = [item for item in found if item.step not in begun]
    return Losses(
        restarts=sum(item.lost or 0 for item in attempts),
        recoveries=sum(step_number(item.detail.get("steps_lost")) or 0 for item in inside),
        seconds=tuple(
            value for item in found if (value := finite(item.detail.get("seconds"))) is not None
        ),
    )


def progress(rows: Rows, buckets: int = PROGRESS_BUCKETS) -> list[Progress]:
    """Step over time by attempt, at most `2 * buckets` points each."""
    times = _times(rows)
    found = []
    for attempt in np.unique(rows.attempt).tolist():
        chosen = np.flatnonzero((rows.attempt == attempt) & np.isfinite(times))
        chosen = chosen[np.argsort(times[chosen], kind="stable")]
        pieces = [piece for piece in np.array_split(chosen, buckets) if len(piece)]
        kept = [at for piece in pieces for at in dict.fromkeys((piece[0], piece[-1]))]
        if kept:
            found.append(Progress(attempt, times[kept], rows.step[kept].astype(np.float64)))
    return found
