"""Whole JSONL lines into Arrow tables.

Arrow's own JSON reader is several times as fast as Python's, yet it refuses a block for one torn
line or one value of another type. So each block is tried fast, with the words for non-finite values
as the bare numbers that Arrow knows, and read again line by line if Arrow refuses it or sees
anything but plain numbers. Both ways give the same table.
"""

import io
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.json

NON_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
# Within a text quotes are escaped, so this is always a value.
WORD = re.compile(rb':\s*"(NaN|-?Infinity)"')
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
MATRIX = pa.list_(pa.list_(pa.float64()))
# The end of the year 9999.
LAST_S = 253_402_300_799.0
EXPERT_SCHEMA = pa.schema(
    [("step", pa.int64()), ("layers", pa.list_(pa.int32())), ("load", MATRIX), ("bias", MATRIX)]
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Records with a valid step as a table, and the number of lines that held none."""

    table: pa.Table
    skipped: int


def parse_json(content: bytes) -> Any:
    """The JSON value in `content`. Halves of surrogate pairs, which no text may hold, become `?`.

    Raises ValueError if it is no whole JSON, or too deep.
    """
    try:
        value = json.loads(content)
        if SURROGATE.search(content):
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value
    except RecursionError as error:
        raise ValueError("too deep") from error


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`, or None if it holds anything else."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def parse_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The objects on the lines of `data`, and how many other lines there were, blank ones aside."""
    lines = [line for line in data.split(b"\n") if line.strip()]
    records = [record for record in map(parse_line, lines) if record is not None]
    return records, len(lines) - len(records)


def number(value: object) -> float | None:
    """A metric's value as a float: non-finite values come as words; others give None."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def number_or_nan(value: object) -> float:
    """As `number`, with NaN for what is none."""
    found = number(value)
    return math.nan if found is None else found


def finite(value: object) -> float | None:
    """As `number`, with None also for a non-finite one."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def non_finite_word(value: float) -> str | None:
    """The word that stands for a non-finite value in a run folder; None for a finite one."""
    if math.isfinite(value):
        return None
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def step_number(value: object) -> int | None:
    """A step count from a record: a whole number of 0 or more that fits 63 bits, else None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**63 else None


def metrics_table(data: bytes) -> Parsed:
    """A table of `step` (int64) and a float64 column for each key that holds numbers."""
    fast = _fast(data)
    if fast is not None and all(_is_plain(fast.schema.field(name)) for name in fast.column_names):
        numeric = [name for name in fast.column_names if _is_number(fast.schema.field(name).type)]
        columns = {name: fast[name].cast(pa.float64()) for name in numeric if name != "step"}
        return Parsed(pa.table({"step": fast["step"]} | columns), 0)
    records, skipped = _with_step(data)
    columns = {name: [number(r.get(name)) for r in records] for name in _names(records)}
    steps = pa.array([step_number(r["step"]) for r in records], pa.int64())
    found = {name: pa.array(values, pa.float64()) for name, values in columns.items()}
    return Parsed(pa.table({"step": steps} | found), skipped)


def experts_table(data: bytes) -> Parsed:
    """A table of `EXPERT_SCHEMA`; lines without a load are skipped."""
    fast = _fast(data)
    if fast is not None and "load" in fast.column_names and fast["load"].null_count == 0:
        try:
            return Parsed(_as_experts(fast), 0)
        except (pa.ArrowException, ValueError):
            pass
    records, skipped = _with_step(data)
    rows = [
        {
            "step": step_number(record["step"]),
            "layers": _whole_numbers(record.get("layers")),
            "load": _matrix(record.get("load")),
            "bias": _matrix(record.get("bias")),
        }
        for record in records
    ]
    kept = [row for row in rows if row["load"] is not None]
    return Parsed(pa.Table.from_pylist(kept, EXPERT_SCHEMA), skipped + len(rows) - len(kept))


def _fast(data: bytes) -> pa.Table | None:
    """Arrow's reading of `data`; None if it fails, counts other lines, or a step is not plain."""
    if b'"NaN"' in data or b'Infinity"' in data:
        data = WORD.sub(rb":\1", data)
    options = pyarrow.json.ReadOptions(use_threads=False, block_size=max(len(data), 1))
    try:
        table = pyarrow.json.read_json(io.BytesIO(data), read_options=options)
        names = table.column_names
    except (pa.ArrowException, ValueError):
        return None
    if table.num_rows != data.count(b"\n") or "step" not in names:
        return None
    steps = table["step"]
    if not pa.types.is_integer(steps.type) or steps.null_count:
        return None
    return table if steps.to_numpy().min() >= 0 else None


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _is_plain(field: pa.Field) -> bool:
    """Whether Python's reading of the column would be the same: numbers, or no metric at all."""
    kind = field.type
    return _is_number(kind) or pa.types.is_null(kind) or pa.types.is_nested(kind)


def _as_experts(table: pa.Table) -> pa.Table:
    missing = pa.nulls(table.num_rows)
    columns = [
        table[field.name] if field.name in table.column_names else missing
        for field in EXPERT_SCHEMA
    ]
    return pa.Table.from_arrays(columns, names=EXPERT_SCHEMA.names).cast(EXPERT_SCHEMA)


def _with_step(data: bytes) -> tuple[list[dict[str, Any]], int]:
    records, skipped = parse_lines(data)
    kept = [record for record in records if step_number(record.get("step")) is not None]
    return kept, skipped + len(records) - len(kept)


def _names(records: Iterable[dict[str, Any]]) -> list[str]:
    """Keys that hold a number in some record, in order of appearance."""
    found = dict.fromkeys(
        name for record in records for name, value in record.items() if number(value) is not None
    )
    # Arrow cannot hold a name that is no valid Unicode.
    return [name for name in found if name != "step" and name.isprintable()]


def _whole_numbers(value: object) -> list[int] | None:
    if not isinstance(value, list):
        return None
    numbers = [step_number(item) for item in value]
    return [n for n in numbers if n is not None and n < 2**31] if None not in numbers else None


def _matrix(value: object) -> list[list[float | None]] | None:
    """A list of lists of numbers, or None if `value` is anything else."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return None
    return [[number(item) for item in row] for row in value]


def text(value: object, most: int) -> str | None:
    """A text of at most `most` characters, or None if `value` is none."""
    return value[:most] if isinstance(value, str) else None


def texts(value: object, most: int = 200) -> tuple[str, ...]:
    """The items of a list as texts of at most `most` characters each; none if it is no list."""
    return tuple(str(item)[:most] for item in items(value))


def time_s(value: object) -> float | None:
    """Seconds since the epoch, or None if `value` is no moment that a calendar has."""
    found = number(value)
    return found if found is not None and 0 <= found <= LAST_S else None


def items(value: object) -> list[Any]:
    """`value` if it is a JSON array, or an empty one."""
    return value if isinstance(value, list) else []


def mapping(value: object) -> dict[str, Any]:
    """`value` if it is a JSON object, or an empty one."""
    return value if isinstance(value, dict) else {}
