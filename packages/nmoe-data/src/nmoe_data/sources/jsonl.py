"""JSON lines, plain or compressed, and JSON arrays: every bad record is named, none stops the run.

Lines end at \\n only, so U+2028 inside a string does not split one. Each line is parsed alone by
orjson, which is strict: invalid UTF-8, lone surrogates and NaN are errors of that line.
"""

import json
import zlib
from collections.abc import Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard

from nmoe_data.sources.compressed import Stream, open_stream
from nmoe_data.sources.record import BYTE_ORDER_MARK, PAST_ALL, Record, from_text

# A line longer than this is no record; reading it whole would take all memory.
MAX_LINE_BYTES = 1 << 28
SKIP_BYTES = 1 << 20
DAMAGED = (EOFError, zlib.error, BadGzipFile, zstandard.ZstdError)


def read_jsonl(path: str, position: int, text_field: str) -> Iterator[Record]:
    """Yields a record per line from byte `position` (of the decompressed stream) on.

    A compressed file that is cut or damaged gives one rejection for the rest of it.
    """
    stream = open_stream(Path(path))
    offset = position
    try:
        _skip(stream.data, position)
        for line in _lines(stream.data):
            end = offset + len(line) + _skip_overlong(stream.data, line)
            yield _record(line, offset, end, stream.raw.tell(), text_field)
            offset = end
    except DAMAGED as error:
        yield _cut(stream, offset, error)
    finally:
        stream.close()


def _cut(stream: Stream, offset: int, error: Exception) -> Record:
    reason = "truncated" if isinstance(error, EOFError) else "damaged"
    return Record(offset, PAST_ALL, stream.raw.tell(), None, reason, f"rest of the file: {error}")


def _skip(data: BinaryIO, count: int) -> None:
    if count and not data.seekable():
        while count and (block := data.read(min(count, SKIP_BYTES))):
            count -= len(block)
    elif count:
        data.seek(count)


def _lines(data: BinaryIO) -> Iterator[bytes]:
    while line := data.readline(MAX_LINE_BYTES):
        yield line


def _skip_overlong(data: BinaryIO, line: bytes) -> int:
    if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
        return 0
    skipped = 0
    while part := data.readline(SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _record(line: bytes, offset: int, end: int, consumed: int, text_field: str) -> Record:
    if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
        detail = f"longer than {MAX_LINE_BYTES} bytes"
        return Record(offset, end, consumed, None, "line-too-long", detail)
    if offset == 0:
        line = line.removeprefix(BYTE_ORDER_MARK)
    if not line.strip():
        return Record(offset, end, consumed, None, "blank-line")
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Record(offset, end, consumed, None, *_json_problem(line, error))
    if _has_duplicate_field(line, text_field):
        detail = f'"{text_field}" stands twice'
        return Record(offset, end, consumed, None, "duplicate-field", detail)
    return _from_value(value, offset, end, consumed, text_field)


def _json_problem(line: bytes, error: orjson.JSONDecodeError) -> tuple[str, str]:
    try:
        line.decode()
    except UnicodeDecodeError as utf8_error:
        return "invalid-utf8", f"byte {utf8_error.start} of the line"
    if "surrogate" in str(error):
        return "lone-surrogate", str(error)
    return "invalid-json", str(error)


def _has_duplicate_field(line: bytes, text_field: str) -> bool:
    """Tells whether the record names the field twice; orjson would keep the last in silence."""
    if line.count(orjson.dumps(text_field)) < 2:
        return False
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Called innermost first, so the last call is for the record itself.
        names = [name for name, _ in pairs]
        repeated[:] = [text_field] if names.count(text_field) > 1 else []
        return dict(pairs)

    try:
        json.loads(line, object_pairs_hook=collect)
    except RecursionError:
        # Nested too deep to tell; refused rather than guessed.
        return True
    return bool(repeated)


def _from_value(value: Any, at: int, following: int, consumed: int, text_field: str) -> Record:
    if not isinstance(value, dict):
        return Record(at, following, consumed, None, "not-an-object", type(value).__name__)
    if text_field not in value:
        detail = f'no "{text_field}" among {sorted(value)[:8]}'
        return Record(at, following, consumed, None, "missing-field", detail)
    text = value[text_field]
    if text is None:
        return Record(at, following, consumed, None, "null-text")
    if not isinstance(text, str):
        return Record(at, following, consumed, None, "text-not-a-string", type(text).__name__)
    return from_text(at, following, consumed, text)


def read_json(path: str, position: int, text_field: str) -> Iterator[Record]:
    """Yields the elements of a JSON array, a lone object, or else the lines of the file.

    Positions in an array are element numbers. The file is read whole.
    """
    data = Path(path).read_bytes()
    try:
        value = orjson.loads(data.removeprefix(BYTE_ORDER_MARK))
    except orjson.JSONDecodeError as error:
        if data.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] != b"[":
            yield from read_jsonl(path, position, text_field)
        elif position == 0:
            reason, detail = _json_problem(data, error)
            yield Record(0, 1, len(data), None, reason, f"the whole array: {detail}")
        return
    elements = value if isinstance(value, list) else [value]
    for number in range(position, len(elements)):
        consumed = len(data) * (number + 1) // len(elements)
        yield _from_value(elements[number], number, number + 1, consumed, text_field)
