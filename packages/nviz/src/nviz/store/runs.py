"""Finds runs under a folder and reads each one's run.json, through a cache.

A run is a folder that holds `run.json`, at the root itself or one to three levels below it. A file
is read again only when its modification time, size or inode changed, so a list of hundreds of runs
costs one directory walk. A run's key is its path below the root; pages look keys up in the index
and never build a path from what an address says, so no address reaches outside the root.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nviz.errors import VizError
from nviz.store.folders import key_below, search
from nviz.store.json_files import parse_object, read_object
from nviz.store.parse import items, mapping, number, step_number, text, texts, time_s

STALLED_AFTER_S = 120.0
LARGEST_RUN_JSON_BYTES = 16 * 2**20
STATUSES = ("running", "completed", "interrupted", "failed")

Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of the run: its number from 1, when, and after which step it went on."""

    number: int
    started_unix_s: float | None = None
    from_step: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What run.json says, cleaned: every field has its type whatever the file held.

    `status` is one of `STATUSES`, `stalled` (says running, yet nothing was written for two minutes)
    or `unreadable`, and then `problem` says why. Times are seconds since the epoch.
    """

    key: str
    folder: Path
    name: str
    status: str
    identity: int = 0
    problem: str | None = None
    tags: tuple[str, ...] = ()
    group: str | None = None
    started_unix_s: float | None = None
    updated_unix_s: float | None = None
    ended_unix_s: float | None = None
    attempt: int = 1
    attempts: tuple[Attempt, ...] = ()
    step: int | None = None
    steps: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    device: str | None = None
    data_folder: str | None = None
    fingerprint: str | None = None
    git_revision: str | None = None
    results: dict[str, float] = field(default_factory=dict)

    def duration_s(self, now_unix_s: float) -> float | None:
        """Seconds from the start to the end, to the last word of a dead run, or to now."""
        if self.started_unix_s is None:
            return None
        end = now_unix_s if self.status == "running" else self.ended_unix_s or self.updated_unix_s
        return max(0.0, (end or now_unix_s) - self.started_unix_s)

    def matches(self, words: str) -> bool:
        """Whether every word is in the name, key, status, group or tags, case ignored."""
        whole = " ".join([self.name, self.key, self.status, self.group or "", *self.tags]).lower()
        return all(word in whole for word in words.lower().split())

    @property
    def is_live(self) -> bool:
        """Whether more steps may come."""
        return self.status in ("running", "stalled")


def signature(path: Path) -> Signature | None:
    """(mtime in ns, size in bytes, inode) of a file, or None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def find_run_folders(root: Path) -> Iterator[Path]:
    """Folders at or below `root` that hold run.json; a run's own folders are not searched."""
    return search(root, lambda folder: (folder / "run.json").is_file())


def _text(value: object) -> str | None:
    return text(value, 500)


def _attempts(value: object) -> tuple[Attempt, ...]:
    """The attempts in run.json by number; entries without a number are left out."""
    entries = [mapping(item) for item in items(value)]
    found = {
        attempt: Attempt(
            attempt, time_s(item.get("started_unix_s")), step_number(item.get("from_step"))
        )
        for item in entries
        if (attempt := step_number(item.get("attempt")))
    }
    return tuple(sorted(found.values(), key=lambda attempt: attempt.number))


def _status(value: object) -> str:
    return value if isinstance(value, str) and value in STATUSES else "unreadable"


def _results(value: object) -> dict[str, float]:
    found = {name: number(item) for name, item in mapping(value).items()}
    return {name: item for name, item in found.items() if item is not None}


def unreadable(key: str, folder: Path, problem: str) -> Run:
    """A run that can be listed but not shown."""
    name = key.rpartition("/")[2]
    return Run(key=key, folder=folder, name=name, status="unreadable", problem=problem)


def parse_run(key: str, folder: Path, content: bytes) -> Run:
    """The run that `content`, of its run.json, describes. Never raises on bad content."""
    return _run_of(key, folder, *parse_object(content, "run.json"))


def read_run(key: str, folder: Path) -> Run:
    """Read `folder`/run.json. Never raises: what cannot be read comes back as `unreadable`."""
    return _run_of(key, folder, *read_object(folder / "run.json", LARGEST_RUN_JSON_BYTES))


def _run_of(key: str, folder: Path, value: dict[str, Any], problem: str | None) -> Run:
    if problem is not None:
        return unreadable(key, folder, problem)
    status = _status(value.get("status"))
    return Run(
        key=key,
        folder=folder,
        name=_text(value.get("name")) or _text(value.get("run_id")) or key.rpartition("/")[2],
        status=status,
        problem="run.json has an unknown status" if status == "unreadable" else None,
        tags=texts(value.get("tags")),
        group=_text(value.get("group")),
        started_unix_s=time_s(value.get("started_unix_s")),
        updated_unix_s=time_s(value.get("updated_unix_s")),
        ended_unix_s=time_s(value.get("ended_unix_s")),
        attempt=step_number(value.get("attempt")) or 1,
        attempts=_attempts(value.get("attempts")),
        step=step_number(value.get("step")),
        steps=step_number(value.get("steps")),
        config=mapping(value.get("config")),
        versions=mapping(value.get("versions")),
        layout=mapping(value.get("layout")),
        hosts=texts(value.get("hosts")),
        device=_text(value.get("device")),
        data_folder=_text(mapping(value.get("data")).get("dir")),
        fingerprint=_text(value.get("fingerprint")),
        git_revision=_text(value.get("git_revision")),
        results=_results(value.get("results")),
    )


def last_metrics_write(folder: Path) -> float:
    """When a metrics file was last written, in seconds since the epoch; 0 if there is none."""
    try:
        with os.scandir(folder / "metrics") as entries:
            found = list(entries)
        # A part that is sealed empties its live file, so that one is always the newest.
        live = [entry for entry in found if entry.name.endswith(".jsonl")] or found
        return max((entry.stat().st_mtime for entry in live), default=0.0)
    except OSError:
        return 0.0


class RunIndex:
    """The runs under `root`, kept fresh by `refresh`. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        """Raises VizError `E-RUNS-MISSING` if `root` is not a folder that can be listed."""
        self.root = root
        self._lock = threading.Lock()
        self._seen: dict[Path, tuple[Signature, Run]] = {}
        try:
            os.scandir(root).close()
        except OSError as error:
            raise VizError(
                "E-RUNS-MISSING",
                f"{root} is not a folder that can be read ({error.strerror})",
                "give the folder that holds the runs, or one run's folder",
            ) from error

    def refresh(self, now_unix_s: float | None = None) -> dict[str, Run]:
        """Runs by key, the newest first. `now_unix_s` is for the choice of `stalled`."""
        now = time.time() if now_unix_s is None else now_unix_s
        with self._lock:
            folders = list(find_run_folders(self.root))
            self._seen = {path: self._seen[path] for path in folders if path in self._seen}
            runs = [self._with_liveness(self._read(path), now) for path in folders]
        runs.sort(key=lambda run: (run.started_unix_s or 0.0, run.key), reverse=True)
        return {run.key: run for run in runs}

    def _read(self, folder: Path) -> Run:
        found = signature(folder / "run.json")
        known = self._seen.get(folder)
        if known and known[0] == found:
            return known[1]
        run = read_run(key_below(self.root, folder), folder)
        if run.status == "unreadable" or found is None:
            # A half-written file: the last good reading serves until a whole one is there.
            return known[1] if known and known[1].status != "unreadable" and found else run
        run = self._identified(run, folder)
        self._seen[folder] = (found, run)
        return run

    def _identified(self, run: Run, folder: Path) -> Run:
        """Tell a folder that was deleted and made anew under its old name from the first one."""
        try:
            inode = folder.stat().st_ino
        except OSError:
            inode = 0
        return replace(run, identity=hash((inode, run.started_unix_s)))

    def _with_liveness(self, run: Run, now: float) -> Run:
        if run.status != "running":
            return run
        heard = max(run.updated_unix_s or 0.0, last_metrics_write(run.folder))
        return replace(run, status="stalled") if now - heard > STALLED_AFTER_S else run
