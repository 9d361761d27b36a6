"""One read-only SQL database over all runs: views `runs`, `metrics`, `events`.

A snapshot: the files are read into memory first, then file access (Python look-ups with it) and all
settings are locked, and every statement runs in a read-only transaction with a time limit. Names
with `/` need double quotes in SQL: `SELECT step, "loss/train" FROM metrics`.
"""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from nviz.errors import VizError
from nviz.store.run_data import ROWS, RunData, literal, quoted
from nviz.store.runs import Run

READ_TYPES = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
LIMIT_S = 30.0
RUN_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("run", "name", "status", "group", "device")),
        ("tags", pa.list_(pa.string())),
        *((name, pa.int64()) for name in ("attempt", "step", "steps")),
        *((f"{name}_unix_s", pa.float64()) for name in ("started", "updated", "ended")),
        *((name, pa.string()) for name in ("fingerprint", "git_revision")),
        *((name, pa.string()) for name in ("config", "results", "layout")),
    ]
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of a query. `truncated` says that the row limit cut some off."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    truncated: bool


class Database:
    """A snapshot of `runs` that answers read-only SQL. Safe to use from several threads."""

    def __init__(self, runs: Iterable[Run], metrics: bool = True) -> None:
        """Reads the runs; with `metrics` false only run.json, and `metrics` and `events` stay
        empty.
        """
        self._lock = threading.Lock()
        self._connection = duckdb.connect(":memory:")
        self._running = self._connection
        runs = list(runs)
        self._load_runs(runs)
        self._load_metrics(runs if metrics else [])
        for setting in (
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def close(self) -> None:
        """Free the snapshot."""
        self._connection.close()

    def interrupt(self) -> None:
        """Stop the query that another thread waits for; it raises there."""
        self._running.interrupt()

    def query(self, sql: str, most_rows: int | None = None, limit_s: float = LIMIT_S) -> Answer:
        """Run one SELECT.

        Raises VizError: `E-SQL-READ-ONLY` for anything but one reading statement, `E-SQL` for what
        the database refuses, `E-SQL-TIME` after `limit_s` seconds.
        """
        with self._lock:
            cursor = self._running = self._connection.cursor()
            _refuse_writes(cursor, sql)
            late = threading.Timer(limit_s, cursor.interrupt)
            late.start()
            try:
                # A SELECT may hide a write (WITH x AS (DELETE ...)): the transaction refuses it.
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                return _fetch(cursor.execute(sql), most_rows)
            except duckdb.InterruptException as error:
                raise VizError(
                    "E-SQL-TIME", f"the query ran longer than {limit_s:g} s", "ask for fewer rows"
                ) from error
            except duckdb.Error as error:
                raise _sql_error(error) from error
            finally:
                late.cancel()
                cursor.close()

    def _load_runs(self, runs: list[Run]) -> None:
        table = pa.Table.from_pylist([_run_row(run) for run in runs], schema=RUN_SCHEMA)
        self._connection.register("found", table)
        self._connection.execute("CREATE TABLE runs AS SELECT * FROM found")
        self._connection.unregister("found")

    def _load_metrics(self, runs: list[Run]) -> None:
        self._connection.execute(
            "CREATE TABLE metrics(run VARCHAR, attempt INTEGER, rank INTEGER, step BIGINT, "
            "superseded BOOLEAN)"
        )
        self._connection.execute(
            "CREATE TABLE events(run VARCHAR, time_unix_s DOUBLE, event VARCHAR, step BIGINT, "
            "detail VARCHAR)"
        )
        columns: dict[str, str] = {}
        for run in runs:
            data = RunData(run.folder, self._connection, "loading", list(columns.values()))
            data.refresh(experts=False)
            self._take_run(run, data, columns)
            data.close()

    def _take_run(self, run: Run, data: RunData, columns: dict[str, str]) -> None:
        for name in data.metrics:
            if name.lower() not in columns:
                columns[name.lower()] = name
                self._connection.execute(f"ALTER TABLE metrics ADD COLUMN {quoted(name)} DOUBLE")
        data.connection.execute(
            f"INSERT INTO main.metrics BY NAME SELECT {literal(run.key)} AS run, "
            f"* EXCLUDE (seq, sealed) FROM ({ROWS})"
        )
        data.connection.execute(
            f"INSERT INTO main.events BY NAME SELECT {literal(run.key)} AS run, "
            "* EXCLUDE (seq) FROM events ORDER BY seq"
        )


def _run_row(run: Run) -> dict[str, Any]:
    fields = {name: getattr(run, name, None) for name in RUN_SCHEMA.names}
    texts = {name: json.dumps(getattr(run, name)) for name in ("config", "results", "layout")}
    return fields | texts | {"run": run.key, "tags": list(run.tags)}


def _refuse_writes(cursor: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = cursor.extract_statements(sql)
    except duckdb.Error as error:
        raise _sql_error(error) from error
    if len(statements) != 1 or statements[0].type not in READ_TYPES:
        raise VizError(
            "E-SQL-READ-ONLY", "only one reading statement is allowed", "write a single SELECT"
        )


def _sql_error(error: duckdb.Error) -> VizError:
    return VizError("E-SQL", str(error).strip(), "mend the query; views: runs, metrics, events")


def _fetch(result: duckdb.DuckDBPyConnection, most_rows: int | None) -> Answer:
    columns = [item[0] for item in result.description or []]
    if most_rows is None:
        return Answer(columns, result.fetchall(), truncated=False)
    rows = result.fetchmany(most_rows + 1)
    return Answer(columns, rows[:most_rows], truncated=len(rows) > most_rows)
