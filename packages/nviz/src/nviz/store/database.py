"""One read-only SQL database over all runs: views `runs`, `metrics`, `events`.

A snapshot: it knows which files there are and reads the live ones into memory. Sealed parts stay
where they are and are read by the queries that ask for them, only the columns and runs that those
name, so that a hundred million rows can be asked. After that all other files, Python's objects and
all settings are out of reach, and every statement runs in a read-only transaction with limits of
time and memory. Names with `/` need double quotes in SQL: `SELECT step, "loss/train" FROM metrics`.
"""

import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from nviz.errors import VizError
from nviz.store.events import EVENTS, Event, newest_events
from nviz.store.files import MetricsFile, list_metrics_files
from nviz.store.lines import GrowingLines
from nviz.store.parse import metrics_table
from nviz.store.parts import Part, PartIndex, Schema, unreadable
from nviz.store.runs import Run, signature

READ_TYPES = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
MOST_METRICS = 2000
# Of all runs' events.jsonl together.
MOST_EVENT_BYTES = 64 * 2**20
RESERVED = frozenset({"run", "run_id", "attempt", "rank", "seq", "sealed", "step", "superseded"})
LIMIT_S = 30.0
MEMORY = "2GB"
FILE = "file of a part"
FLUSHED_TOGETHER = 64
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
EVENT_SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("time_unix_s", pa.float64()),
        ("event", pa.string()),
        ("step", pa.int64()),
        ("detail", pa.string()),
    ]
)
KEYS = "run VARCHAR, attempt INTEGER, rank INTEGER, step BIGINT, superseded BOOLEAN"


def quoted(name: str) -> str:
    """`name` as a SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """`text` as a SQL string."""
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of a query. `truncated` says that the row limit cut some off."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    truncated: bool


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A part of a run, and the first step of a later attempt, from which it is superseded."""

    run: str
    file: MetricsFile
    part: Part
    horizon: int | None


def needs_metrics(sql: str) -> bool:
    """Whether a statement may ask for more than `runs`; `query` takes names as values."""
    return any(name in sql.lower() for name in ("metrics", "events", "query"))


class Database:
    """A snapshot of `runs` that answers read-only SQL. Safe to use from several threads.

    `problems` names the files that could not be read.
    """

    def __init__(
        self, runs: Iterable[Run], metrics: bool = True, parts: PartIndex | None = None
    ) -> None:
        """Looks at the runs; with `metrics` false only at run.json, and `metrics` and `events` stay
        empty. `parts` remembers footers from one snapshot to the next.
        """
        self._lock = threading.Lock()
        self._connection = duckdb.connect(":memory:")
        self._parts = parts or PartIndex()
        self._columns: dict[str, str] = {}
        self._waiting: list[pa.Table] = []
        self.problems: list[str] = []
        runs = list(runs)
        self._load_runs(runs)
        paths = self._load_metrics(runs if metrics else [])
        self._load_events(runs if metrics else [])
        self._close_doors(paths)

    def close(self) -> None:
        """Free the snapshot."""
        self._connection.close()

    def works(self) -> bool:
        """Whether it still answers: after an internal error DuckDB does not."""
        try:
            return self._connection.execute("SELECT true").fetchall() == [(True,)]
        except duckdb.Error:
            return False

    def query(self, sql: str, most_rows: int | None = None, limit_s: float = LIMIT_S) -> Answer:
        """Run one SELECT.

        Raises VizError: `E-SQL-READ-ONLY` for anything but one reading statement, `E-SQL` for what
        the database refuses, `E-SQL-TIME` after `limit_s` seconds, `E-SQL-MEMORY` for what does not
        fit. Not every statement can be stopped so: for those of strangers there is `SqlWorker`.
        """
        with self._lock:
            cursor = self._connection.cursor()
            _refuse_writes(cursor, sql)
            late = threading.Timer(limit_s, cursor.interrupt)
            late.start()
            try:
                # A SELECT may hide a write (WITH x AS (DELETE ...)): the transaction refuses it.
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                return _fetch(cursor.execute(sql), most_rows)
            except duckdb.InterruptException as error:
                raise late_error(limit_s) from error
            except duckdb.OutOfMemoryException as error:
                raise memory_error() from error
            except duckdb.Error as error:
                raise _sql_error(error) from error
            finally:
                late.cancel()
                cursor.close()

    def _close_doors(self, paths: list[str]) -> None:
        """From here on only `paths` can be read, and no setting be changed."""
        for setting in (
            f"memory_limit = '{MEMORY}'",
            # Nothing is written anywhere, not even what does not fit.
            "temp_directory = ''",
            f"allowed_paths = [{', '.join(map(literal, paths))}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")

    def _load_runs(self, runs: list[Run]) -> None:
        table = pa.Table.from_pylist([_run_row(run) for run in runs], schema=RUN_SCHEMA)
        self._store("runs", table)

    def _load_events(self, runs: list[Run]) -> None:
        sizes = [_size(run.folder / EVENTS) for run in runs]
        share = fair_share(sizes, MOST_EVENT_BYTES)
        tables, cut = [EVENT_SCHEMA.empty_table()], []
        for run in (run for run, size in zip(runs, sizes, strict=True) if size):
            try:
                found, is_cut = newest_events(run.folder, share)
            except OSError as error:
                self.problems.append(f"{run.key}: {EVENTS}: {unreadable(error)}")
                continue
            tables.append(_event_table(run, found))
            cut += [run.key] * is_cut
        if cut:
            more = f" and {len(cut) - 1:,} more run(s)" if cut[1:] else ""
            self.problems.append(f"{cut[0]}{more}: only the newest events are in the view")
        self._store("events", pa.concat_tables(tables))

    def _store(self, name: str, table: pa.Table) -> None:
        self._connection.register("found", table)
        self._connection.execute(f"CREATE TABLE {quoted(name)} AS SELECT * FROM found")
        self._connection.unregister("found")

    def _load_metrics(self, runs: list[Run]) -> list[str]:
        """Makes the view `metrics`; returns the paths that it reads."""
        self._connection.execute(f"CREATE TABLE live({KEYS})")
        groups: dict[Schema, list[_Sealed]] = {}
        for run in runs:
            for sealed in self._load_run(run):
                groups.setdefault(sealed.part.schema, []).append(sealed)
        self._flush_live()
        selects = ["SELECT * FROM live"]
        for number, (schema, members) in enumerate(groups.items()):
            selects.append(self._selection(f"parts_{number}", schema, members))
        self._connection.execute(f"CREATE VIEW metrics AS {' UNION ALL BY NAME '.join(selects)}")
        return [str(item.file.path) for members in groups.values() for item in members]

    def _load_run(self, run: Run) -> list[_Sealed]:
        """The run's parts; its live rows go to the table `live`."""
        files = [file for file in list_metrics_files(run.folder) if not file.experts]
        parts = [(file, part) for file in files if file.sealed and (part := self._part(run, file))]
        live = [(file, rows) for file in files if not file.sealed and (rows := self._live(file))]
        starts: dict[int, int] = {}
        spans = [(file.attempt, part.first) for file, part in parts]
        spans += [(file.attempt, int(rows["step"].to_numpy().min())) for file, rows in live]
        for attempt, first in spans:
            starts[attempt] = min(first, starts.get(attempt, first))
        for file, rows in live:
            own = [p for f, p in parts if (f.attempt, f.rank) == (file.attempt, file.rank)]
            self._store_live(run, file, _unsealed(rows, own), _horizon(starts, file.attempt))
        return [
            _Sealed(run.key, file, part, _horizon(starts, file.attempt)) for file, part in parts
        ]

    def _part(self, run: Run, file: MetricsFile) -> Part | None:
        try:
            return self._parts.part(file)
        except (OSError, pa.ArrowException, ValueError) as error:
            self.problems.append(f"{run.key}: {file.path.name}: {unreadable(error)}")
            return None

    def _live(self, file: MetricsFile) -> pa.Table | None:
        """The rows of a live file, each step once, or None if there is none."""
        blocks = []
        try:
            blocks = [metrics_table(data).table for data in GrowingLines(file.path).new_blocks()]
        except OSError as error:
            self.problems.append(f"{file.path.name}: {unreadable(error)}")
        if not sum(block.num_rows for block in blocks):
            return None
        whole = pa.concat_tables(blocks, promote_options="default").combine_chunks()
        steps = whole["step"].to_numpy()
        _, last = np.unique(steps[::-1], return_index=True)
        return whole.take(pa.array(np.sort(len(steps) - 1 - last)))

    def _store_live(self, run: Run, file: MetricsFile, rows: pa.Table, horizon: int | None) -> None:
        count = rows.num_rows
        steps = rows["step"].to_numpy()
        late = np.zeros(count, dtype=np.bool_) if horizon is None else steps >= horizon
        known = self._known([name for name in rows.column_names if name != "step"])
        columns: dict[str, Any] = {
            "run": pa.repeat(run.key, count),
            "attempt": pa.repeat(file.attempt, count),
            "rank": pa.repeat(file.rank, count),
            "step": rows["step"],
            "superseded": late,
        }
        for name, column in known.items():
            columns.setdefault(column, rows[name])
        self._waiting.append(pa.table(columns))
        if len(self._waiting) >= FLUSHED_TOGETHER:
            self._flush_live()

    def _flush_live(self) -> None:
        """Inserts the live rows that wait, all at once: one by one they would take longer."""
        if not self._waiting:
            return
        whole = pa.concat_tables(self._waiting, promote_options="default")
        self._connection.register("found", whole)
        self._connection.execute("INSERT INTO live BY NAME SELECT * FROM found")
        self._connection.unregister("found")
        self._waiting = []

    def _known(self, names: Sequence[str]) -> dict[str, str]:
        """Column of each metric, made if it is new; names that differ in case share one column."""
        known = {}
        for name in names:
            folded = name.lower()
            if not name or folded in RESERVED or not name.isprintable():
                continue
            if folded not in self._columns:
                if len(self._columns) >= MOST_METRICS:
                    continue
                self._connection.execute(f"ALTER TABLE live ADD COLUMN {quoted(name)} DOUBLE")
                self._columns[folded] = name
            known[name] = self._columns[folded]
        return known

    def _selection(self, table: str, schema: Schema, members: list[_Sealed]) -> str:
        """SQL that reads parts of one schema; `table` tells the run of each file."""
        self._store(
            table,
            pa.table(
                {
                    FILE: [str(item.file.path) for item in members],
                    "run": [item.run for item in members],
                    "attempt": pa.array([item.file.attempt for item in members], pa.int32()),
                    "rank": pa.array([item.file.rank for item in members], pa.int32()),
                    "horizon": pa.array([item.horizon for item in members], pa.int64()),
                }
            ),
        )
        known = self._known([name for name, _ in schema if name != "step"])
        by_column = {column: name for name, column in reversed(known.items())}
        values = [
            f"TRY_CAST(p.{quoted(name)} AS DOUBLE) AS {quoted(column)}"
            for column, name in by_column.items()
        ]
        keys = (
            "f.run, f.attempt, f.rank, TRY_CAST(p.step AS BIGINT) AS step, "
            "coalesce(TRY_CAST(p.step AS BIGINT) >= f.horizon, false) AS superseded"
        )
        paths = ", ".join(literal(str(item.file.path)) for item in members)
        return (
            f"SELECT {', '.join([keys, *values])} "
            f"FROM read_parquet([{paths}], filename = {literal(FILE)}) p "
            f"JOIN {table} f ON p.{quoted(FILE)} = f.{quoted(FILE)} "
            "WHERE TRY_CAST(p.step AS BIGINT) >= 0"
        )


def _size(path: Path) -> int:
    found = signature(path)
    return found[1] if found else 0


def fair_share(sizes: Sequence[int], most: int) -> int:
    """The largest part that each of `sizes` may give so that all parts sum up to `most` at most."""
    for at, size in enumerate(ordered := sorted(sizes)):
        if size * (len(ordered) - at) > most:
            return max(0, most // (len(ordered) - at))
        most -= size
    return max(ordered, default=0)


def _event_table(run: Run, found: Sequence[Event]) -> pa.Table:
    rows = [
        {
            "run": run.key,
            "time_unix_s": event.time_unix_s,
            "event": event.event,
            "step": event.step,
            "detail": json.dumps(event.detail, sort_keys=True),
        }
        for event in found
    ]
    return pa.Table.from_pylist(rows, schema=EVENT_SCHEMA)


def _horizon(starts: dict[int, int], attempt: int) -> int | None:
    """The first step of any later attempt."""
    return min((first for later, first in starts.items() if later > attempt), default=None)


def _unsealed(rows: pa.Table, parts: Sequence[Part]) -> pa.Table:
    """The live rows that no part of the same attempt and rank holds."""
    steps = rows["step"].to_numpy()
    keep = np.ones(len(steps), dtype=np.bool_)
    for part in parts:
        keep &= (steps < part.first) | (steps > part.last)
    return rows.filter(pa.array(keep))


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


def late_error(limit_s: float) -> VizError:
    """Of a query that took too long."""
    return VizError("E-SQL-TIME", f"the query ran longer than {limit_s:g} s", "ask for fewer rows")


def memory_error(
    what: str = f"the query needs more than the {MEMORY} of memory it may",
) -> VizError:
    """Of a query that wants too much memory."""
    return VizError("E-SQL-MEMORY", what, "ask for fewer rows, or shorter values")


def _sql_error(error: duckdb.Error) -> VizError:
    # DuckDB adds a picture of the place, and advice on settings that are locked here.
    what, _, rest = str(error).strip().partition("\n\n")
    place = re.match(r"LINE (\d+):", rest)
    where = f" in line {place[1]}" if place else ""
    return VizError(
        "E-SQL", " ".join(what.split()) + where, "mend the query; views: runs, metrics, events"
    )


def _fetch(result: duckdb.DuckDBPyConnection, most_rows: int | None) -> Answer:
    columns = [item[0] for item in result.description or []]
    if most_rows is None:
        return Answer(columns, result.fetchall(), truncated=False)
    rows = result.fetchmany(most_rows + 1)
    return Answer(columns, rows[:most_rows], truncated=len(rows) > most_rows)
