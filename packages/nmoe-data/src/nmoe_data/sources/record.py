"""One record of a source file: a text, or the reason why there is none."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

# A position past any record: the rest of the file is not to be read again.
PAST_ALL = 1 << 62
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """A record as a reader found it.

    position: where it starts: a byte offset (after decompression), or a row number for Parquet and
    JSON arrays. next_position: where reading goes on after it. consumed: bytes of the file on disk
    used up to here, for progress. text: the document, or None if `reason` says why not. reason: a
    short stable word ("invalid-json"). detail: what exactly was wrong.
    """

    position: int
    next_position: int
    consumed: int
    text: str | None = None
    reason: str = ""
    detail: str = ""


class Reader(Protocol):
    """Reads the records of one file from a position on; raises OSError if it cannot be read."""

    def __call__(self, path: str, position: int, text_field: str) -> Iterator[Record]: ...


def text_problem(text: str) -> tuple[str, str] | None:
    """Returns why a text cannot be a document, as (reason, detail), or None if it can."""
    if not text or text.isspace():
        return "empty", f"{len(text)} characters, none but white space"
    problem = nul_problem(text)
    if problem is not None:
        return problem
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return "lone-surrogate", f"character {error.start} is half of a pair"
    return None


def nul_problem(content: str | bytes) -> tuple[str, str] | None:
    """Returns where a text, or the bytes of a file, holds a NUL, as (reason, detail), or None."""
    if isinstance(content, bytes):
        place, unit = content.find(0), "byte"
    else:
        place, unit = content.find("\0"), "character"
    return None if place < 0 else ("nul-byte", f"NUL at {unit} {place}")


def from_text(position: int, next_position: int, consumed: int, text: str) -> Record:
    """Returns the record of a text, rejected if it cannot be a document."""
    problem = text_problem(text)
    if problem is None:
        return Record(position, next_position, consumed, text)
    return Record(position, next_position, consumed, None, *problem)
