"""What sealed parts hold, from their footers alone: columns, and first and last step.

A footer is read once: sealed parts do not change, and an index outlives the snapshots made with it.
"""

import threading
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from nviz.store.columns import is_metric, read_part
from nviz.store.files import MetricsFile
from nviz.store.recent import Recent

MOST_BYTES = 128 * 2**20
ENTRY_BYTES = 600
Schema = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Names and Arrow types of a part's metrics, and the span of its steps."""

    schema: Schema
    first: int
    last: int


class PartIndex:
    """Footers of parts that were looked at. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: Recent[object, Part] = Recent(MOST_BYTES, lambda _: ENTRY_BYTES)
        # Thousands of parts share a few schemas: each is kept once.
        self._schemas: dict[Schema, Schema] = {}
        self._lock = threading.Lock()

    def part(self, file: MetricsFile) -> Part | None:
        """What `file` holds, or None if it is empty. Raises OSError, ArrowException or ValueError
        if it cannot be read or has no steps.
        """
        key = (file.path, file.signature)
        known = self._known.get(key)
        if known is None:
            known = self._read(file)
            self._known.put(key, known)
        return known if known.first <= known.last else None

    def _read(self, file: MetricsFile) -> Part:
        with pq.ParquetFile(file.path, memory_map=True) as part:
            fields = [field for field in part.schema_arrow if is_metric(field.type)]
            footer = part.metadata
        schema = tuple((field.name, str(field.type)) for field in fields)
        with self._lock:
            schema = self._schemas.setdefault(schema, schema)
        if "step" not in dict(schema):
            raise ValueError("no column named step")
        first, last = _span(footer) or _span_of_values(file)
        return Part(schema, first, last)


def _span(footer: pq.FileMetaData) -> tuple[int, int] | None:
    """First and last step by the footer's statistics, or None if it has none for all rows."""
    at = [footer.schema.column(i).path for i in range(footer.num_columns)].index("step")
    spans = []
    for group in range(footer.num_row_groups):
        statistics = footer.row_group(group).column(at).statistics
        if statistics is None or not statistics.has_min_max:
            return None
        if not isinstance(statistics.min, int) or statistics.null_count:
            return None
        spans.append((statistics.min, statistics.max))
    if not spans or min(first for first, _ in spans) < 0:
        return None
    return min(first for first, _ in spans), max(last for _, last in spans)


def _span_of_values(file: MetricsFile) -> tuple[int, int]:
    steps = read_part(file.path, ["step"])["step"].values
    valid = steps[steps >= 0]
    return (int(valid.min()), int(valid.max())) if len(valid) else (0, -1)


def unreadable(error: OSError | pa.ArrowException | ValueError) -> str:
    """Why a file could not be read, on one line."""
    return f"unreadable ({(str(error).splitlines() or [''])[0][:160]})"
