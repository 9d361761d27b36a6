"""The process beside rank 0 that mirrors a run's checkpoints: it costs no step its time.

It is told on its standard input what to do (a JSON line, then a word a line) and says on its
standard output what happened (JSON lines). The newest complete checkpoint is always next, so one
that storage is too slow for is skipped. It leaves at once when its input ends, as when the trainer
dies; what is half sent is then invisible, and the next start goes on with the files that are not
there yet.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nmoe_data.errors import DataError
from nmoe_data.files import only_writer

from nmoe_train.errors import TrainError
from nmoe_train.storage.folders import COMPLETE, CORRUPT, complete_checkpoints, step_of
from nmoe_train.storage.mirror import Mirror
from nmoe_train.storage.target import Target, reason

LOOK, FINISH = "look", "finish"
TOLD_EVERY_S = 1.0
LOCK_POLL_S = 0.2
PATIENCE_S = 5.0
"""How long another uploader may take to end."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
NICENESS = 10


class Uploader:
    """Keeps a mirror at the newest checkpoint under `root`. `keep` is that of `Mirror.prune`."""

    def __init__(self, root: Path, mirror: Mirror, keep: int | None) -> None:
        self._root, self._mirror, self._keep = root, mirror, keep
        self._newest = 0
        self._told = 0
        self._damaged: set[int] = set()
        """Times at which folders were completed; one that is made again has another."""

    def follow(self, words: "queue.Queue[str]") -> None:
        """Uploads until it is told to finish and nothing is left that can be."""
        pause_s, word = FIRST_PAUSE_S, LOOK
        while True:
            sound = self._try()
            if word == FINISH:
                return
            pause_s = FIRST_PAUSE_S if sound else min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                word = words.get(timeout=None if sound else pause_s)
            except queue.Empty:
                continue
            with contextlib.suppress(queue.Empty):
                while word != FINISH:
                    word = words.get_nowait()

    def _try(self) -> bool:
        """Uploads what is next; whether the mirror now has the newest sound checkpoint."""
        for folder in complete_checkpoints(self._root):
            step = step_of(folder.name)
            if step == self._newest:
                return True
            try:
                completed_ns = (folder / COMPLETE).stat().st_mtime_ns
                if completed_ns in self._damaged:
                    continue
                self._upload(folder, step)
            except FileNotFoundError as error:
                if folder.exists():
                    return self._fails(step, reason(error))
                continue
            except TrainError as error:
                self._fails(step, str(error))
                if error.code != CORRUPT:
                    return False
                self._damaged.add(completed_ns)
                continue
            # Whatever the storage raises: the training must not know.
            except Exception as error:
                return self._fails(step, reason(error))
            return True
        return True

    def _fails(self, step: int, why: str) -> bool:
        """Says once that a step is not mirrored."""
        if step != self._told:
            self._told = step
            say("alert", what=f"step {step} is not in the mirror {self._mirror.url}: {why}")
        return False

    def _upload(self, folder: Path, step: int) -> None:
        began_s = time.monotonic()
        new = not self._mirror.holds(folder)
        progress = Progress(step, sum(p.stat().st_size for p in folder.iterdir()))
        if new:
            self._mirror.upload(folder, progress.sent)
        self._newest = step
        seconds = time.monotonic() - began_s
        say("mirrored", step=step, bytes=progress.size, seconds=seconds, new=new)
        try:
            self._mirror.prune(step, self._keep)
        except Exception as error:  # each storage raises kinds of its own
            say("alert", what=f"older checkpoints stay in {self._mirror.url}: {reason(error)}")


class Progress:
    """Says now and then how much of a checkpoint is there."""

    def __init__(self, step: int, size: int) -> None:
        self._step, self.size = step, size
        self._sent, self._said_s = 0, time.monotonic()
        self._lock = threading.Lock()

    def sent(self, count: int) -> None:
        """So many more bytes are there; from any thread."""
        with self._lock:
            self._sent += count
            if time.monotonic() - self._said_s < TOLD_EVERY_S:
                return
            self._said_s = time.monotonic()
            say("progress", step=self._step, sent=self._sent, bytes=self.size)


def say(kind: str, **fields: Any) -> None:
    """Tells the trainer one thing."""
    line = json.dumps({"kind": kind, **fields}) + "\n"
    try:
        sys.stdout.write(line)
        sys.stdout.flush()
    except OSError:
        os._exit(0)


def _listen(words: "queue.Queue[str]") -> None:
    """Hands on what the trainer says; its end is that of this process."""
    for line in sys.stdin:
        words.put(line.strip())
    os._exit(0)


def main() -> None:
    """What `python -m nmoe_train.storage.uploader` does."""
    order = json.loads(sys.stdin.readline())
    words: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(words,), daemon=True).start()
    os.nice(NICENESS)
    root = Path(order["root"])
    root.mkdir(parents=True, exist_ok=True)
    try:
        mirror = Mirror(Target(order["url"], order["patience_s"], order["limit"]))
    except TrainError as error:
        say("alert", what=f"nothing is mirrored: {error}")
        return
    with contextlib.ExitStack() as held:
        if _alone(root, words, held):
            Uploader(root, mirror, order["keep"]).follow(words)


def _alone(root: Path, words: "queue.Queue[str]", held: contextlib.ExitStack) -> bool:
    """Waits for the uploader of an attempt that has just died; whether this one may upload.

    Where the other one lives on, as that of a trainer that hangs, that is told, and this one leaves
    when it is told to finish.
    """
    patient_until_s = time.monotonic() + PATIENCE_S
    other = f"another uploader, perhaps of a trainer that hangs, holds {root}"
    told = finish = False
    while True:
        with contextlib.suppress(DataError):
            held.enter_context(only_writer(root))
            if finish:
                words.put(FINISH)
            return True
        if time.monotonic() > patient_until_s:
            if not told:
                say("alert", what=f"{other}: nothing is mirrored until it ends")
                told = True
            if finish:
                say("alert", what=f"the newest checkpoint is not in the mirror: {other}")
                return False
        with contextlib.suppress(queue.Empty):
            finish = words.get(timeout=LOCK_POLL_S) == FINISH or finish


if __name__ == "__main__":
    main()
