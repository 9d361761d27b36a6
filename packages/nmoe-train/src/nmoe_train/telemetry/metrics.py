"""Metrics of a rank: a live JSON-lines file, sealed into Parquet parts as it grows.

Two streams with the same life: one record of scalars a step, and one record of every expert's load
a step. The live file is line-buffered, so a reader sees each step at once. Non-finite numbers are
kept: as strings in JSON ("NaN", "Infinity", "-Infinity"), as themselves in Parquet. While a part is
being sealed its rows stand in both files; readers prefer the part.
"""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from nmoe_data.files import atomic_write

Record = Mapping[str, Any]


class MetricsWriter:
    """Appends records of one attempt of one rank; call `close` to seal what is left.

    Files: `<attempt>-<rank>.jsonl` and `<attempt>-<rank>-<part>.parquet`, and the same with
    `-experts` at the end of the name for the loads. These are the whole run's, which readers would
    count once for every rank that wrote them, so rank 0 alone does.
    """

    def __init__(self, folder: Path, attempt: int, rank: int, seal_every: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kinds = ("", "-experts") if rank == 0 else ("",)
        stem = f"{attempt}-{rank}"
        self._streams = {kind: _Stream(folder, stem, kind, seal_every) for kind in kinds}

    def step(self, scalars: Record, experts: Record) -> None:
        """Appends a step: its scalars and expert loads. Raises OSError if the disk is full."""
        for kind, record in (("", scalars), ("-experts", experts)):
            if kind in self._streams:
                self._streams[kind].append(record)

    def close(self) -> None:
        """Seals the live files."""
        for stream in self._streams.values():
            stream.close()


class _Stream:
    def __init__(self, folder: Path, stem: str, kind: str, seal_every: int) -> None:
        self._folder, self._stem, self._kind, self._seal_every = folder, stem, kind, seal_every
        self._live = folder / f"{stem}{kind}.jsonl"
        self._rows: list[Record] = []
        self._part = 0
        self._file = self._live.open("x", buffering=1, encoding="utf-8")

    def append(self, record: Record) -> None:
        self._file.write(json.dumps(_json_ready(record), separators=(",", ":")) + "\n")
        self._rows.append(record)
        if len(self._rows) >= self._seal_every:
            self._seal()
            self._file = self._live.open("a", buffering=1, encoding="utf-8")

    def close(self) -> None:
        if self._rows:
            self._seal()
        self._file.close()

    def _seal(self) -> None:
        table = pa.Table.from_pylist([dict(row) for row in self._rows], schema=_schema(self._rows))
        part = self._folder / f"{self._stem}-{self._part:03d}{self._kind}.parquet"
        sealed = io.BytesIO()
        pq.write_table(table, sealed, compression="zstd")
        atomic_write(part, sealed.getvalue())
        self._file.close()
        atomic_write(self._live, b"")
        self._rows, self._part = [], self._part + 1


def _schema(rows: list[Record]) -> pa.Schema:
    """Columns of all rows, of a type that fits all their values: a key that a row lacks is null."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return pa.schema([(key, pa.array(values).type) for key, values in columns.items()])


def _json_ready(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
