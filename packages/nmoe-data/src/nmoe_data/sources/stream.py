"""One stream of documents and rejections over all files of a source, from a cursor on."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nmoe_data.sources.listing import SourceFile
from nmoe_data.sources.record import PAST_ALL, Record


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where to go on: a file's number, and a position inside it."""

    file: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from.

    text: never empty, no NUL, valid UTF-8. source_index: the number of its file in the listing.
    byte_offset: where its record starts in the file (after decompression), or its row number for
    Parquet and JSON arrays. id: the first 8 bytes of the text's BLAKE2b, little-endian; equal texts
    have equal ids. cursor: reading goes on from here. consumed: bytes of its file used so far.
    """

    text: str
    source_index: int
    byte_offset: int
    id: int
    cursor: Cursor
    consumed: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """A record that is no document, where it stands, and why."""

    source_index: int
    byte_offset: int
    reason: str
    detail: str
    cursor: Cursor
    consumed: int


def document_id(text: str) -> int:
    """Returns the 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def read_documents(
    files: list[SourceFile], cursor: Cursor | None = None, text_field: str = "text"
) -> Iterator[Document | Rejection]:
    """Yields each record of `files` from `cursor` on; a file that cannot be read is a rejection."""
    start = cursor or Cursor()
    for number in range(start.file, len(files)):
        position = start.position if number == start.file else 0
        for record in read_records(files[number], position, text_field):
            yield _item(record, number)


def read_records(file: SourceFile, position: int, text_field: str) -> Iterator[Record]:
    """Yields the records of one file from `position` on; one that cannot be read is a rejection."""
    if position == PAST_ALL:
        return
    at = position
    empty = position == 0
    try:
        for record in file.reader(str(file.path), position, text_field):
            at = record.next_position
            empty = False
            yield record
    except OSError as error:
        yield Record(at, PAST_ALL, file.size, None, "unreadable", str(error))
        return
    if empty:
        yield Record(0, PAST_ALL, file.size, None, "empty", "no records in the file")


def _item(record: Record, number: int) -> Document | Rejection:
    cursor = Cursor(number, record.next_position)
    if record.text is None:
        return Rejection(
            number, record.position, record.reason, record.detail, cursor, record.consumed
        )
    return Document(
        record.text, number, record.position, document_id(record.text), cursor, record.consumed
    )


def sample_texts(
    files: Sequence[SourceFile], max_bytes: int, seed: int = 0, text_field: str = "text"
) -> Iterator[str]:
    """Yields about `max_bytes` of text spread over the files, the same for the same arguments.

    Files come in an order keyed by `seed` and their names; each gives a share by its size, as every
    n-th of its documents (n at most 8, so that a single huge file is not read to its end).
    """
    files = [file for file in files if file.supported]
    total = max(sum(file.size for file in files), 1)
    share = min(1.0, max_bytes / total)
    left = max_bytes
    for file in sorted(files, key=lambda file: _key(seed, file)):
        quota = min(left, max(1, round(file.size * share)))
        for text in _sample_file(file, quota, share, text_field):
            yield text
            left -= len(text.encode())
        if left <= 0:
            return


def _key(seed: int, file: SourceFile) -> bytes:
    # Without the root: how a source was typed must not change what is learned from it.
    return hashlib.blake2b(f"{seed}\0{file.name}".encode(), digest_size=8).digest()


def _sample_file(file: SourceFile, quota: int, share: float, text_field: str) -> Iterator[str]:
    stride = max(1, min(8, round(1 / share)))
    documents = (
        record.text for record in read_records(file, 0, text_field) if record.text is not None
    )
    for number, text in enumerate(documents):
        if number % stride:
            continue
        yield text
        quota -= len(text.encode())
        if quota <= 0:
            return
