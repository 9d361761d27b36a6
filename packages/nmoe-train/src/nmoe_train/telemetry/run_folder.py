"""The run folder: who may write it, run.json, and the events of a run.

One process at a time holds a run folder, rank 0 of the run; the other ranks only put their metrics
there. `run.json` says what the run is and how far it is;
`events.jsonl` says what happened to it, a line an event. Starting again in the same folder is the
next attempt of the same run.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nmoe_data
import nmoe_kernels
import torch
from nmoe_data.files import atomic_write

import nmoe_train
from nmoe_train.errors import TrainError

SCHEMA_VERSION = 1


class RunFolder:
    """The run folder of a process that holds it alone; `metrics`, `checkpoints` are in it.

    A process that does not hold it is given the `record` of the one that does, and writes neither
    run.json nor events. `guard` is called before anything is written, and raises where this process
    may not any more. Raises what `next_record` does.
    """

    def __init__(
        self,
        path: Path,
        record: dict[str, Any] | None = None,
        *,
        holds: bool = True,
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.metrics = path / "metrics"
        self.checkpoints = path / "checkpoints"
        self.record: dict[str, Any] = next_record(path) if record is None else record
        self.completed: bool = self.record["status"] == "completed"
        self._holds, self._guard = holds, guard
        self._written_s = 0.0

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1; 0 before the first."""
        number: int = self.record["attempt"]
        return number

    def begin(self, from_step: int, **fields: Any) -> None:
        """Opens the next attempt and writes run.json with `fields` beside the common ones."""
        attempt = self.attempt + 1
        begun = {"attempt": attempt, "started_unix_s": time.time(), "from_step": from_step}
        self.record |= {
            "attempt": attempt,
            "attempts": [*self.record["attempts"], begun],
            "status": "running",
            "step": from_step,
            "ended_unix_s": None,
            "git_revision": _git_revision(),
            "versions": _versions(),
            "pid": os.getpid(),
            **fields,
        }
        self._write()
        self.event("resume" if self.attempt > 1 else "start", step=from_step)

    def progress(self, step: int) -> None:
        """Notes how far the run is; writes at most every two seconds."""
        self.record["step"] = step
        if time.monotonic() - self._written_s > 2.0:
            self._write()

    def end(self, status: str, **results: Any) -> None:
        """Closes the attempt with a status ("completed", "interrupted", "failed")."""
        self.record |= {"status": status, "ended_unix_s": time.time()}
        self.record["results"] = self.record["results"] | results
        self._write()
        self.event("end", step=self.record.get("step", 0), status=status)

    def event(self, name: str, **fields: Any) -> None:
        """Appends a line to events.jsonl; a line that a full disk cut short is ended first."""
        if not self._holds:
            return
        line = json.dumps({"time_unix_s": time.time(), "event": name, **fields}).encode() + b"\n"
        with (self.path / "events.jsonl").open("ab+") as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read(1) == b"\n" else b"\n" + line
            # As late as can be: a process that is stopped after this writes when it goes on.
            if self._guard is not None:
                self._guard()
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())

    def _write(self) -> None:
        if not self._holds:
            return
        if self._guard is not None:
            self._guard()
        self._written_s = time.monotonic()
        self.record["updated_unix_s"] = time.time()
        content = json.dumps(self.record, indent=1, default=str).encode()
        atomic_write(self.path / "run.json", content)


def next_record(path: Path) -> dict[str, Any]:
    """What the next attempt in a run folder knows of those before it.

    Raises TrainError `E-RUN-RECORD` when run.json is damaged, OSError when it cannot be read.
    """
    previous = _read_json(path / "run.json")
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": path.resolve().name,
        "attempt": max(previous.get("attempt", 0), _last_attempt(path / "metrics")),
        "attempts": previous.get("attempts", []),
        "started_unix_s": previous.get("started_unix_s", time.time()),
        "results": previous.get("results", {}),
        "status": previous.get("status"),
    }


def close_record(path: Path, what: str) -> None:
    """Says of a run whose processes are gone, and could not do so themselves, that and why it
    failed; nothing where they did. For who holds the folder.
    """
    record = _read_json(path / "run.json")
    if record.get("status") == "running":
        folder = RunFolder(path, record)
        folder.event("fault", step=record.get("step", 0), what=what)
        folder.end("failed")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        kinds = {"attempt": int, "attempts": list, "results": dict}
        if not isinstance(content, dict) or not all(
            isinstance(content[key], kind) for key, kind in kinds.items()
        ):
            raise ValueError("it holds no record of a run")
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError) as error:
        raise TrainError(
            "E-RUN-RECORD", f"{path} is damaged ({error})", "remove that file and start again"
        ) from None
    return content


def _last_attempt(metrics: Path) -> int:
    """The highest attempt that left metrics, so that no later one writes over them."""
    numbers = (path.name.split("-")[0] for path in metrics.glob("*-*"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nmoe-train": nmoe_train.__version__,
        "nmoe-data": nmoe_data.__version__,
        "nmoe-kernels": nmoe_kernels.__version__,
    }


def _git_revision() -> str | None:
    """Revision of the checkout that this package runs from, or None where it is installed."""
    command = ["git", "log", "-1", "--format=%H", "--", Path(__file__).name]
    folder = Path(__file__).parent
    try:
        found = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not found.stdout.strip():
        return None
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False
    )
    return head.stdout.strip() or None
