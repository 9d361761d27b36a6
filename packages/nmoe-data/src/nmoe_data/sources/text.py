"""A file of plain text or source code: one record, the whole file.

A byte-order mark is dropped; line ends stay as they are. A NUL byte or invalid UTF-8 rejects the
file: it is binary, or in an encoding that would have to be guessed.
"""

from collections.abc import Iterator
from pathlib import Path

from nmoe_data.sources.record import BYTE_ORDER_MARK, Record, from_text, nul_problem


def read_text(path: str, position: int, text_field: str) -> Iterator[Record]:
    """Yields the file as one record; nothing when `position` is past it."""
    del text_field
    if position > 0:
        return
    data = Path(path).read_bytes()
    end = max(len(data), 1)
    # Before the decoding, so that UTF-16 is told from text with one bad byte.
    problem = nul_problem(data)
    if problem is not None:
        yield Record(0, end, len(data), None, *problem)
        return
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        yield Record(0, end, len(data), None, "invalid-utf8", str(error))
        return
    yield from_text(0, end, len(data), text)


def read_unsupported(path: str, position: int, text_field: str) -> Iterator[Record]:
    """Yields one rejection: nothing reads this extension, and nothing is skipped in silence."""
    del text_field
    if position == 0:
        yield Record(0, 1, 0, None, "unsupported-extension", Path(path).suffix or "no extension")
