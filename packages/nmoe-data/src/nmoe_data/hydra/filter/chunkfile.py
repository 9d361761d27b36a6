"""What a worker made of one chunk, as one file: kept text, scores, samples, rejections.

The file is a line of JSON (sizes, counts, a digest) and four sections behind it. It is a cache: it
need not outlive a power cut, so it is not synchronised to the disk; one whose digest is wrong, or
that was made under other settings, counts as not there.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from nmoe_data.files import TEMPORARY_SUFFIX

DIGEST_BYTES = 16
LONGEST_HEADER = 1 << 26

SCORES_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("probe_quality", pa.float32()),
        ("judge_quality", pa.float32()),
        ("quality", pa.float32()),
        ("scores", pa.list_(pa.float32())),
        ("decision", pa.string()),
        ("decided_by", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A record that is no document: its file's number, where it stands, why."""

    file: int
    offset: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The documents of one chunk, decided; or, before a judge was asked, with a band left open.

    position: where the next record begins, PAST_ALL after the end of the file. consumed: bytes on
    disk used of that file. scores: rows of `SCORES_SCHEMA`. kept: lines of JSON, a zstandard
    frame; it also holds the band where that is left open. dropped: (key, line) of the sample.
    rejected: records that are no documents.
    """

    position: int
    consumed: int
    scores: pa.Table
    kept: bytes
    dropped: list[tuple[int, bytes]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


def write_chunk(path: Path, result: ChunkResult, settings: str) -> None:
    """Writes `path` so that it appears whole or not at all; `settings` must match to read it."""
    sections = [
        result.kept,
        _table_bytes(result.scores),
        b"".join(line for _, line in result.dropped),
    ]
    header = {
        "settings": settings,
        "position": result.position,
        "consumed": result.consumed,
        "sizes": [len(section) for section in sections],
        "dropped": [[key, len(line)] for key, line in result.dropped],
        "rejected": [asdict(row) for row in result.rejected],
        "digest": _digest(sections),
    }
    # Its own name: a worker of a killed run may still be writing the same chunk.
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(orjson.dumps(header, option=orjson.OPT_APPEND_NEWLINE))
            file.writelines(sections)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_chunk(path: Path, settings: str) -> ChunkResult | None:
    """Returns what `write_chunk` wrote, None if it is not there, damaged or of other settings."""
    try:
        with path.open("rb") as file:
            header = orjson.loads(file.readline(LONGEST_HEADER))
            sections = [file.read(size) for size in header["sizes"]]
        if header["settings"] != settings or header["digest"] != _digest(sections):
            return None
        return _result(header, sections)
    except (FileNotFoundError, orjson.JSONDecodeError, KeyError, TypeError, pa.ArrowException):
        return None


def _result(header: dict[str, Any], sections: list[bytes]) -> ChunkResult:
    kept, table, lines = sections
    dropped, at = [], 0
    for key, size in header["dropped"]:
        dropped.append((key, lines[at : at + size]))
        at += size
    return ChunkResult(
        position=header["position"],
        consumed=header["consumed"],
        scores=pa.ipc.open_stream(table).read_all(),
        kept=kept,
        dropped=dropped,
        rejected=[Rejected(**row) for row in header["rejected"]],
    )


def _table_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _digest(sections: Sequence[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for section in sections:
        digest.update(section)
    return digest.hexdigest()
