"""The trainer's side of mirroring: the process that uploads, what it is told and what it says.

The process is no part of the training: it shares neither its memory nor its interpreter, and when
it fails, training goes on. It ends with the trainer, whose end closes its input.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nmoe_train.storage.uploader import FINISH, LOOK

LEAVE_S = 5.0


@dataclass(frozen=True)
class Orders:
    """What is mirrored and how: the folder of checkpoints, and the arguments of Target and Mirror.

    `limit`: bytes a second. `keep`: checkpoints in the mirror.
    """

    root: Path
    url: str
    patience_s: float
    keep: int | None = None
    limit: float | None = None


class Uploads:
    """The uploading process; it is started by `look` where it is not there."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._process: subprocess.Popen[str] | None = None
        self._news: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader: threading.Thread | None = None
        self._leaving = False
        self.newest = 0
        """Step of the newest checkpoint that is complete there as here; 0 if none is."""
        self.progress: tuple[int, int, int] | None = None
        """The step under way, and its bytes: those that are there, and all."""

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def look(self) -> None:
        """A checkpoint is complete, or may be."""
        if not self.alive:
            self._start()
        self._send(LOOK)

    def finish(self) -> None:
        """Lets the process end by itself, once what is complete is uploaded, or cannot be."""
        if not self.alive:
            self._start()
        self._send(FINISH)

    def end(self) -> None:
        """Ends the process at once; what it had said, or why it was gone, is then news."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            self._leaving = True
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S)
            self._hear_out()
        self._reader = None

    def tell(self, what: str) -> None:
        """Something that the user should know; from any thread."""
        self._news.put({"kind": "alert", "what": what})

    def news(self) -> list[dict[str, Any]]:
        """What happened since the last call: `mirrored` (step, bytes, seconds) and `alert`."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def progress_text(self) -> str:
        """How far the upload under way is."""
        if self.progress is None:
            return "nothing of the newest checkpoint is there yet"
        step, sent, size = self.progress
        return f"step {step}, {sent / 1e6:,.0f} of {size / 1e6:,.0f} MB"

    def _hear_out(self) -> None:
        """Waits until all that an ended process had said is heard, which its end bounds."""
        if self._reader is not None:
            self._reader.join()

    def _start(self) -> None:
        self._hear_out()
        self._leaving = False
        orders = self._orders
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nmoe_train.storage.uploader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Ctrl-C is for the trainer, which then waits for the upload or does not.
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            self.tell(f"nothing is mirrored: the uploader cannot be started ({error})")
            return
        self._send(json.dumps({**orders.__dict__, "root": str(orders.root)}))
        self._reader = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._reader.start()

    def _send(self, word: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            # One that has ended is told of by the thread that listens to it.
            with contextlib.suppress(OSError):
                self._process.stdin.write(word + "\n")
                self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        stdout: IO[str] | None = process.stdout
        assert stdout is not None
        for line in stdout:
            said = json.loads(line)
            if said["kind"] == "progress":
                self.progress = said["step"], said["sent"], said["bytes"]
            elif said["kind"] == "mirrored":
                self.newest, self.progress = said["step"], None
                if said["new"]:
                    self._news.put(said)
            else:
                self._news.put(said)
        code = process.wait()
        if not self._leaving and code:
            again = "the next save or start of the run starts it again"
            self.tell(f"the uploader has ended (exit code {code}); {again}")
