"""The run folder: who may write it, run.json, and the events of a run.

One process at a time owns a run folder (an advisory lock that the system drops with the process).
`run.json` says what the run is and how far it is; `events.jsonl` says what happened to it, a line
an event. Starting again in the same folder is the next attempt of the same run.
"""

import fcntl
import json
import os
import platform
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from nmoe_train.errors import TrainError
from nmoe_train.files import write_bytes_atomic

SCHEMA_VERSION = 1


class RunFolder:
    """An owned run folder. `metrics`, `checkpoints` are its sub-folders.

    Raises TrainError `E-RUN-BUSY` when another process owns it, OSError when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics"
        self.checkpoints = path / "checkpoints"
        path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            previous = _read_json(path / "run.json")
        except BaseException:
            self.release()
            raise
        self.record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "run_id": path.resolve().name,
            "attempts": previous.get("attempts", []),
            "started_unix_s": previous.get("started_unix_s", time.time()),
            "results": previous.get("results", {}),
        }
        self.completed: bool = previous.get("status") == "completed"
        self._written_s = 0.0

    @property
    def attempt(self) -> int:
        """Number of this attempt, from 1."""
        return len(self.record["attempts"])

    def begin(self, from_step: int, **fields: Any) -> None:
        """Opens the next attempt and writes run.json with `fields` beside the common ones."""
        now = time.time()
        self.record["attempts"] = [
            *self.record["attempts"],
            {"attempt": self.attempt + 1, "started_unix_s": now, "from_step": from_step},
        ]
        self.record |= {
            "attempt": self.attempt,
            "status": "running",
            "step": from_step,
            "ended_unix_s": None,
            "git_revision": _git_revision(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "hosts": [socket.gethostname()],
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
        line = json.dumps({"time_unix_s": time.time(), "event": name, **fields}).encode() + b"\n"
        with (self.path / "events.jsonl").open("ab+") as stream:
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                line = line if stream.read(1) == b"\n" else b"\n" + line
            stream.write(line)

    def release(self) -> None:
        """Gives the folder up."""
        os.close(self._lock)

    def _write(self) -> None:
        self._written_s = time.monotonic()
        self.record["updated_unix_s"] = time.time()
        content = json.dumps(self.record, indent=1, default=str).encode()
        write_bytes_atomic(self.path / "run.json", content)

    def _take_lock(self) -> int:
        descriptor = os.open(self.path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise TrainError(
                "E-RUN-BUSY",
                f"another process is training in {self.path}",
                "wait for it, stop it, or choose another run folder",
            ) from None
        return descriptor


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it holds no record")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TrainError(
            "E-RUN-RECORD", f"{path} is damaged ({error})", "remove that file and start again"
        ) from None
    return content


def _git_revision() -> str | None:
    """Revision of the checkout that the process was started in, or None outside one."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
