"""Answers SQL in a process of its own, so that no statement takes the dashboard with it.

A statement may want more than DuckDB's own limits see: one value of gigabytes, a recursion that
does not let itself be interrupted. So the parent keeps one child that holds a snapshot of the runs.
The child may map no more than `MOST_EXTRA_BYTES` beyond what it held before the statement; the
parent kills it if it has not answered `GRACE_S` seconds after the time limit. What died is started
anew by the next statement. The child ends as soon as its input closes, which it does when the
parent ends, however that ends.

A message is a pickle behind its length. Both ends are this file.
"""

import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import duckdb

from nviz.errors import VizError
from nviz.store.database import Answer, Database, late_error, memory_error, needs_metrics
from nviz.store.files import list_metrics_files
from nviz.store.parts import PartIndex
from nviz.store.runs import Run, RunIndex, signature

MOST_EXTRA_BYTES = 5 * 2**29
MOST_ANSWER_BYTES = 512 * 2**20
GRACE_S = 5.0
# Reading all runs is not part of the statement's time, but does not last for ever either.
MOST_SNAPSHOT_S = 600.0
# A snapshot is kept, though files changed, for this many times what it took to make, up to a limit.
KEPT_TIMES, MOST_KEPT_S = 4.0, 15.0
LENGTH = struct.Struct("<Q")
# Exit codes of the child: Python's own after an error, and one for too little memory.
FAILED, OUT_OF_MEMORY = 1, 3
# Not `-m`: pickles name the module, which would then be `__main__`.
START = "from nviz.store.sql_worker import main; main()"


@dataclass(frozen=True, slots=True)
class Question:
    """One statement and its limits: rows, bytes of the pickled reply, seconds."""

    sql: str
    most_rows: int
    most_bytes: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The rows, when the snapshot that gave them was taken (seconds since the epoch), and the files
    that could not be read for it.
    """

    answer: Answer
    taken_unix_s: float
    problems: tuple[str, ...]


class SqlWorker:
    """The parent's end: at most one child, one statement at a time. Safe for several threads."""

    def __init__(self, root: Path) -> None:
        """`root` holds the runs. Nothing is started yet."""
        self._root = root.resolve()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def query(
        self, sql: str, most_rows: int, limit_s: float, most_bytes: int = MOST_ANSWER_BYTES
    ) -> Reply:
        """Run one SELECT.

        Raises VizError as `Database.query` does, `E-SQL-MEMORY` or `E-SQL-TIME` if the child died
        of it or had to be killed, and `E-SQL-WORKER` if it failed in another way.
        """
        with self._lock:
            try:
                found = self._ask(Question(sql, most_rows, most_bytes, limit_s))
            except BaseException:
                # Also of a Ctrl-C: the answer that still comes belongs to no other statement.
                self._end()
                raise
        if isinstance(found, Reply):
            return found
        raise VizError(*found)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._end()

    def _ask(self, question: Question) -> Any:
        """The child's word: a Reply, or the arguments of a VizError."""
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        waits_s = (MOST_SNAPSHOT_S, question.limit_s + GRACE_S)
        found = None
        try:
            _send(child.stdin, question)
            # The first message says that the snapshot is there: the statement's time begins.
            for wait_s in waits_s:
                with _killed_after(child, wait_s) as late:
                    found = _receive(child.stdout)
        except (EOFError, BrokenPipeError) as error:
            if late.is_set():
                raise late_error(question.limit_s) from error
            # One that did not end by itself was killed for its memory.
            raise (failed_error() if child.wait() == FAILED else memory_error()) from error
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            # Raises if the folder is gone.
            RunIndex(self._root)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(self._root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # A Ctrl-C in the terminal is for the parent.
                start_new_session=True,
            )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        assert child.stdin is not None and child.stdout is not None
        child.stdout.close()
        # A statement that was not written whole has no reader any more.
        with suppress(BrokenPipeError):
            child.stdin.close()


@contextmanager
def _killed_after(child: subprocess.Popen[bytes], wait_s: float) -> Iterator[threading.Event]:
    """Kills the child if the block lasts longer; the event tells that it did."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(wait_s, kill)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _send(pipe: IO[bytes], message: object) -> None:
    _write(pipe, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """The next message. Raises EOFError if the other end is gone."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


class Snapshots:
    """The child's end: the newest snapshots of the runs under `root`, with and without metrics."""

    def __init__(self, root: Path) -> None:
        self._index = RunIndex(root)
        self._parts = PartIndex()
        self._known: dict[bool, _Snapshot] = {}

    def fresh(self, whole: bool) -> "_Snapshot":
        """One that shows the files as they are, or as they were shortly ago if making it is slow.

        With metrics and events only if `whole`, as these take long.
        """
        known = self._known.get(whole)
        if known and not known.database.works():
            del self._known[whole]
            known = None
        kept_s = min(MOST_KEPT_S, KEPT_TIMES * known.made_in_s) if known else 0.0
        if known and time.time() - known.taken_unix_s < kept_s:
            return known
        runs = self._index.refresh()
        state = _state(runs, whole)
        if known and known.state == state:
            return known
        if known:
            known.database.close()
        _limit_memory(None)
        taken_unix_s, started_s = time.time(), time.perf_counter()
        database = Database(runs.values(), whole, self._parts)
        made_in_s = time.perf_counter() - started_s
        self._known[whole] = made = _Snapshot(database, taken_unix_s, made_in_s, state)
        _limit_memory(MOST_EXTRA_BYTES)
        return made


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A database, when it was taken and how long that took, and what the files looked like."""

    database: Database
    taken_unix_s: float
    made_in_s: float
    state: object


def _state(runs: dict[str, Run], whole: bool) -> object:
    """Something that differs if a snapshot of `runs` would."""
    if not whole:
        return runs
    files = [
        (signature(run.folder / "events.jsonl"), *list_metrics_files(run.folder))
        for run in runs.values()
    ]
    return runs, files


def _limit_memory(extra_bytes: int | None) -> None:
    """Lets this process map `extra_bytes` more than it does, or again as much as it likes."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        # Not Linux: DuckDB's own limit and the parent's clock remain.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = pages * resource.getpagesize()
    soft = hard if extra_bytes is None else held + extra_bytes
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _replied(snapshot: _Snapshot, question: Question) -> bytes:
    """The pickled reply to a statement, or the pickled arguments of the error that it ends with."""
    try:
        answer = snapshot.database.query(question.sql, question.most_rows, question.limit_s)
        reply = Reply(answer, snapshot.taken_unix_s, tuple(snapshot.database.problems))
        data = pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > question.most_bytes:
            raise memory_error(f"the answer takes more than {question.most_bytes >> 20} MiB")
        return data
    except VizError as error:
        return pickle.dumps(error.arguments)
    except (ValueError, OverflowError, duckdb.Error) as error:
        # A value that Python has no type for, such as a date after its last year.
        what = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return pickle.dumps(("E-SQL", what, "cast the column to text"))


def serve(root: Path) -> None:
    """Answer statements from stdin on stdout until stdin ends; then end at once."""
    output = os.fdopen(os.dup(1), "wb")
    # What a library prints is not part of an answer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    questions: SimpleQueue[Question] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, questions), daemon=True).start()
    snapshots = Snapshots(root)
    while True:
        question = questions.get()
        try:
            snapshot = snapshots.fresh(needs_metrics(question.sql))
        except MemoryError:
            raise
        except Exception as error:
            # Not the statement's fault: what is in the runs' files was not foreseen.
            _send(output, "ready")
            _send(output, failed_error(f"{type(error).__name__}: {error}").arguments)
            continue
        _send(output, "ready")
        _write(output, _replied(snapshot, question))


def failed_error(why: str = "it ended") -> VizError:
    """Of runs that could not be made ready for SQL."""
    what = f"the process that answers SQL failed ({' '.join(why.split())[:300]})"
    return VizError("E-SQL-WORKER", what, "ask again; if it stays so, move the newest run away")


def _listen(pipe: IO[bytes], questions: "SimpleQueue[Question]") -> None:
    """Beside the statements, so that the end of the parent ends one that runs."""
    try:
        while True:
            questions.put(_receive(pipe))
    finally:
        os._exit(0)


def _go_first() -> None:
    """Should the machine run out of memory, this process is the one to go; it leaves no core."""
    with suppress(ImportError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/oom_score_adj").write_text("1000")


def main() -> None:
    """The child's program; its argument is the runs' folder."""
    _go_first()
    try:
        serve(Path(sys.argv[1]))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
