"""SQL in a process of its own: nothing a statement does ends the dashboard, or outlives it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nviz.errors import VizError
from nviz.store import sql_worker
from nviz.store.sql_worker import SqlWorker
from run_folder import RunFolder, record

# DuckDB cannot be interrupted while it makes one long value.
DEAF = "SELECT length(repeat('x', 1500000000))"
LONG = "SELECT count(*) FROM range(100000000000) WHERE random() > 2"
PARENT = """
import sys, threading, time
from pathlib import Path
from nviz.store.sql_worker import SqlWorker
worker = SqlWorker(Path(sys.argv[1]))
worker.query("SELECT 1", 1, 30.0)
threading.Thread(target=worker.query, args=(sys.argv[2], 1, 300.0), daemon=True).start()
time.sleep(0.5)
print(worker._child.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture
def worker(root: Path) -> Iterator[SqlWorker]:
    """One over a run of three steps."""
    RunFolder(root, "a").append(*(record(step) for step in range(3)))
    made = SqlWorker(root)
    yield made
    made.close()


def rows(worker: SqlWorker, sql: str) -> list[tuple[object, ...]]:
    return worker.query(sql, 100, 30.0).answer.rows


def child_of(worker: SqlWorker) -> int:
    """Process number of the child."""
    assert worker._child is not None
    return worker._child.pid


def is_gone(pid: int) -> bool:
    """Whether the process has ended, within ten seconds."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT repeat('x', 4000000000)",
        "SELECT repeat('x', 300000000) FROM range(30)",
        "SELECT range(1000000000)",
        "SELECT list(range) FROM range(1000000000)",
        "SELECT string_agg(repeat('y', 1000000), '') FROM range(4000)",
        "WITH RECURSIVE t AS (SELECT repeat('a', 1000000) AS s UNION ALL SELECT s || s FROM t) "
        "SELECT max(length(s)) FROM t",
    ],
)
def test_a_statement_too_large_for_the_memory_ends_in_one_line(worker: SqlWorker, sql: str) -> None:
    with pytest.raises(VizError, match=r"^E-SQL-MEMORY: [^\n]*$"):
        worker.query(sql, 100, 30.0)
    assert rows(worker, "SELECT count(*) FROM metrics") == [(3,)], "the next query works"


def test_a_statement_that_cannot_be_interrupted_is_killed_and_the_next_one_works(
    worker: SqlWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_worker, "GRACE_S", 0.2)
    rows(worker, "SELECT 1")
    child, started_s = child_of(worker), time.monotonic()
    with pytest.raises(VizError, match=r"^E-SQL-TIME: the query ran longer than 0.3 s; "):
        worker.query(DEAF, 100, 0.3)
    assert time.monotonic() - started_s < 20.0
    assert is_gone(child)
    assert rows(worker, "SELECT count(*) FROM metrics") == [(3,)]


def test_a_recursion_without_end_is_stopped_within_its_time(worker: SqlWorker) -> None:
    sql = "WITH RECURSIVE t AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM t) SELECT max(x) FROM t"
    with pytest.raises(VizError, match=r"^E-SQL-TIME"):
        worker.query(sql, 100, 0.5)
    assert rows(worker, "SELECT 1") == [(1,)]


def test_an_answer_too_large_to_send_is_refused(worker: SqlWorker) -> None:
    with pytest.raises(VizError, match=r"^E-SQL-MEMORY: the answer takes more than 1 MiB"):
        worker.query("SELECT repeat('x', 2000000)", 100, 30.0, most_bytes=2**20)


def test_a_statement_that_crashes_the_child_ends_in_one_line(worker: SqlWorker) -> None:
    rows(worker, "SELECT 1")
    os.kill(child_of(worker), signal.SIGSTOP)
    stopped = child_of(worker)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -SEGV {stopped}; kill -CONT {stopped}"])
    with pytest.raises(VizError, match=r"^E-SQL-MEMORY"):
        worker.query("SELECT 1", 1, 30.0)
    assert rows(worker, "SELECT 1") == [(1,)]


def test_the_child_is_kept_and_sees_what_is_new(worker: SqlWorker, root: Path) -> None:
    assert rows(worker, "SELECT count(*) FROM metrics") == [(3,)]
    child = child_of(worker)
    run = RunFolder(root, "b")
    run.append(record(0))
    run.event("start", 0)
    counts = "SELECT run, count(*) FROM metrics GROUP BY run ORDER BY run"
    # The old snapshot is kept for a short while.
    end_s = time.monotonic() + 30.0
    while rows(worker, counts) != [("a", 3), ("b", 1)]:
        assert time.monotonic() < end_s
        time.sleep(0.2)
    assert rows(worker, "SELECT run, event FROM events") == [("b", "start")]
    assert child_of(worker) == child


def test_a_snapshot_of_unchanged_files_is_kept(worker: SqlWorker) -> None:
    taken = worker.query("SELECT * FROM metrics", 1, 30.0).taken_unix_s
    time.sleep(1.0)
    assert worker.query("SELECT * FROM metrics", 1, 30.0).taken_unix_s == taken


def test_refusals_come_back_with_their_code(worker: SqlWorker) -> None:
    for sql, code in (("DROP TABLE runs", "E-SQL-READ-ONLY"), ("SELECT nothing", "E-SQL")):
        with pytest.raises(VizError) as caught:
            worker.query(sql, 1, 30.0)
        assert caught.value.code == code


def test_what_python_has_no_type_for_does_not_end_the_child(worker: SqlWorker) -> None:
    rows(worker, "SELECT 1")
    child = child_of(worker)
    with pytest.raises(VizError, match=r"^E-SQL: "):
        worker.query("SELECT interval 999999999 years", 1, 30.0)
    assert child_of(worker) == child


def test_the_child_ends_with_its_owner(root: Path) -> None:
    worker = SqlWorker(root)
    rows(worker, "SELECT 1")
    child = child_of(worker)
    worker.close()
    assert is_gone(child)


@pytest.mark.parametrize("sql", ["SELECT 1", LONG])
def test_the_child_ends_when_its_parent_is_killed(root: Path, sql: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(root), sql], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert is_gone(child)
