"""Parquet files: a record per row of the text column, read a row group at a time."""

from collections.abc import Iterator
from typing import Any

from nmoe_data.sources.record import PAST_ALL, Record, from_text

BATCH_ROWS = 256


def read_parquet(path: str, position: int, text_field: str) -> Iterator[Record]:
    """Yields a record per row from row `position` on.

    A file that is no Parquet, lacks the column, or is damaged gives one rejection for its rest.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = position
    try:
        with pq.ParquetFile(path) as file:
            problem = _column_problem(file, text_field, pa)
            if problem is not None:
                yield Record(0, PAST_ALL, 0, None, *problem)
                return
            for record in _rows(file, position, text_field):
                row = record.next_position
                yield record
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield Record(row, PAST_ALL, 0, None, "damaged", f"rest of the file: {error}")


def _column_problem(file: Any, text_field: str, pa: Any) -> tuple[str, str] | None:
    schema = file.schema_arrow
    if text_field not in schema.names:
        return "missing-field", f'no column "{text_field}" among {schema.names[:8]}'
    kind = schema.field(text_field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return None
    return "text-not-a-string", f'the column "{text_field}" holds {kind}'


def _rows(file: Any, position: int, text_field: str) -> Iterator[Record]:
    size = sum(file.metadata.row_group(g).total_byte_size for g in range(file.num_row_groups))
    total_rows = max(file.metadata.num_rows, 1)
    row = 0
    for group in range(file.num_row_groups):
        group_rows = file.metadata.row_group(group).num_rows
        if row + group_rows <= position:
            row += group_rows
            continue
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[text_field]):
            for value in batch.column(0):
                if row >= position:
                    yield _record(value, row, size * (row + 1) // total_rows)
                row += 1


def _record(value: Any, row: int, consumed: int) -> Record:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return Record(row, row + 1, consumed, None, "invalid-utf8", str(error))
    if text is None:
        return Record(row, row + 1, consumed, None, "null-text")
    return from_text(row, row + 1, consumed, text)
