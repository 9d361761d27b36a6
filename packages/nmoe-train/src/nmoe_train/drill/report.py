"""What a drill showed: every fault with its recovery, and how far the curve is from undisturbed.

Nothing here asks the processes: it reads the run folders that they left, as a user could.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from nmoe_train.drill.inject import SLOW_DISK_S, Injected

TOLERANCE = 1e-5
"""Largest relative difference of the losses: rule 2 of the architecture, in fp32."""
LOSS = "loss/train"
HARMLESS = ("slow-peer", "slow-disk", "full-disk")
"""Faults that end no generation."""


@dataclass(frozen=True)
class Row:
    """A fault and what followed; None where it never did."""

    kind: str
    step: int
    workers: str
    detected_s: float | None
    recovered_s: float | None
    steps_lost: int | None
    layout_before: str
    layout_after: str
    state_from: str
    overtaken: bool = False
    """Never noticed, as a later fault ended the generation first: a slow peer that is not slow for
    long enough to be named, a save that comes to nothing before it fails or is late."""

    @property
    def recovered(self) -> bool:
        """Whether training went on by itself."""
        return self.recovered_s is not None or self.overtaken


@dataclass(frozen=True)
class Report:
    """All rows, and the curves' differences, relative to the undisturbed run."""

    rows: tuple[Row, ...]
    steps: int
    missing_steps: int
    largest_difference: float
    final_loss: float
    final_loss_undisturbed: float
    validation_difference: float

    @property
    def passed(self) -> bool:
        """Whether the run survived everything, with no trace in its losses."""
        return (
            self.missing_steps == 0
            and all(row.recovered for row in self.rows)
            and self.largest_difference <= TOLERANCE
            and self.validation_difference <= TOLERANCE
        )

    def sentence(self) -> str:
        """The whole report in a sentence."""
        recovered = sum(row.recovered for row in self.rows)
        faults = f"{recovered} of {len(self.rows)} faults"
        difference = f"the loss curve differs from the undisturbed run's by {self._worst():.1e}"
        if self.passed:
            return f"passed: all {faults} survived with nobody called, and {difference} at most"
        missing = f", {self.missing_steps} steps have no record" if self.missing_steps else ""
        return f"failed: {faults} survived, {difference} (allowed: {TOLERANCE:.0e}){missing}"

    def _worst(self) -> float:
        return max(self.largest_difference, self.validation_difference)

    def as_json(self) -> dict[str, Any]:
        """All of it, for a file."""
        return {
            "passed": self.passed,
            "sentence": self.sentence(),
            "steps": self.steps,
            "largest_difference": self.largest_difference,
            "final_loss": self.final_loss,
            "final_loss_undisturbed": self.final_loss_undisturbed,
            "validation_difference": self.validation_difference,
            "faults": [vars(row) for row in self.rows],
        }


def make_report(injected: Sequence[Injected], disturbed: Path, undisturbed: Path) -> Report:
    """Compares two finished run folders; `injected` are the faults of the first."""
    events = read_events(disturbed)
    want, got = losses(undisturbed), losses(disturbed)
    shared = sorted(want.keys() & got.keys())
    records = [json.loads((run / "run.json").read_text()) for run in (disturbed, undisturbed)]
    validations = [record["results"].get("loss/validation", float("inf")) for record in records]
    return Report(
        rows=tuple(_row(fault, events) for fault in injected),
        steps=len(want),
        missing_steps=len(want.keys() ^ got.keys()),
        largest_difference=max((_difference(got[s], want[s]) for s in shared), default=0.0),
        final_loss=got[shared[-1]] if shared else float("nan"),
        final_loss_undisturbed=want[shared[-1]] if shared else float("nan"),
        validation_difference=_difference(*validations),
    )


def read_events(run: Path) -> list[dict[str, Any]]:
    """All events of a run, in order."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of each step; of several attempts at one the latest counts."""
    found: dict[int, tuple[int, float]] = {}
    for attempt, row in _rows(run / "metrics"):
        step = row["step"]
        if step not in found or attempt >= found[step][0]:
            found[step] = (attempt, row[LOSS])
    return {step: loss for step, (_, loss) in found.items()}


def _rows(metrics: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """All step records of all attempts and ranks: of a step they say the same."""
    for path in sorted(metrics.iterdir()):
        attempt = int(path.name.split("-")[0])
        if "experts" in path.name:
            continue
        if path.suffix == ".parquet":
            for row in pq.read_table(path).to_pylist():
                yield attempt, row
        else:
            for line in path.read_text().splitlines():
                # The last line of a worker that was killed may be cut.
                if line.endswith("}"):
                    yield attempt, json.loads(line)


def _row(fault: Injected, events: Sequence[Mapping[str, Any]]) -> Row:
    after = [event for event in events if event["time_unix_s"] >= fault.unix_s]
    noticed, recovered = _NOTICED[fault.fault.kind](fault, after)
    return Row(
        kind=fault.fault.kind,
        step=fault.step,
        workers=", ".join(map(str, fault.slots)),
        detected_s=None if noticed is None else noticed["time_unix_s"] - fault.unix_s,
        recovered_s=None if recovered is None else recovered["time_unix_s"] - fault.unix_s,
        steps_lost=None if recovered is None else recovered.get("steps_lost", 0),
        layout_before=_layout(recovered, "layout_before"),
        layout_after=_layout(recovered, "layout"),
        state_from="" if recovered is None else str(recovered.get("from", "")),
        overtaken=noticed is None
        and fault.fault.kind in HARMLESS
        and _first(after, "recovery", lambda e: True) is not None,
    )


Noticed = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]


def _lost_worker(fault: Injected, after: Sequence[Mapping[str, Any]]) -> Noticed:
    """The fault that names one of its workers, and the first recovery since then."""
    # Of a split network either side may be the one that is left.
    split = fault.fault.kind == "partition"
    noticed = _first(after, "fault", lambda e: split or e.get("worker") in fault.workers)
    if noticed is None:
        return None, None
    since = noticed["time_unix_s"]
    return noticed, _first(after, "recovery", lambda e: e["time_unix_s"] >= since)


def _slow_disk(fault: Injected, after: Sequence[Mapping[str, Any]]) -> Noticed:
    """A checkpoint that took as long as the disk did: the run has waited for it."""
    slow = _first(after, "checkpoint", lambda e: e["commit_ms"] >= SLOW_DISK_S * 1e3)
    return slow, slow


def _full_disk(fault: Injected, after: Sequence[Mapping[str, Any]]) -> Noticed:
    """An alert, and the next checkpoint that was complete."""
    alert = _first(after, "alert", lambda e: "not saved" in e["what"])
    if alert is None:
        return None, None
    since = alert["time_unix_s"]
    return alert, _first(after, "checkpoint", lambda e: e["time_unix_s"] >= since)


def _slow_peer(fault: Injected, after: Sequence[Mapping[str, Any]]) -> Noticed:
    """An alert that names a rank; nothing has to be recovered."""
    alert = _first(after, "alert", lambda e: "times as long" in e["what"])
    return alert, alert


_NOTICED = {
    "kill": _lost_worker,
    "stop": _lost_worker,
    "partition": _lost_worker,
    "slow-disk": _slow_disk,
    "full-disk": _full_disk,
    "slow-peer": _slow_peer,
}


def _first(events: Sequence[Mapping[str, Any]], name: str, fits: Any) -> Mapping[str, Any] | None:
    return next((e for e in events if e["event"] == name and fits(e)), None)


def _layout(event: Mapping[str, Any] | None, key: str) -> str:
    sizes = None if event is None else event.get(key)
    if not sizes:
        return ""
    named = (item for item in sizes.items() if item[0] in ("dp", "ep") or item[1] > 1)
    return " ".join(f"{name}{size}" for name, size in named)


def _difference(got: float, want: float) -> float:
    return abs(got - want) / abs(want) if got != want else 0.0
