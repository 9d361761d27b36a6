"""A graded document as a line of JSON: whole where it is kept, cut where it is a sample."""

import hashlib
from dataclasses import dataclass

import orjson

LONGEST_SAMPLE = 4_000


@dataclass(frozen=True, slots=True)
class Row:
    """A document and what was decided about it.

    id: SHA-256 of the text. source, offset: where its record is. quality: 0..1. scores: 0..5 by
    dimension, of whoever spoke last. decided_by: probe, judge, llm or band.
    """

    text: str
    id: str
    source: str
    offset: int
    quality: float
    scores: dict[str, float]
    decided_by: str

    def line(self) -> bytes:
        """Returns the line of kept/part-NNNNN.jsonl.zst."""
        return orjson.dumps(self, option=orjson.OPT_APPEND_NEWLINE)

    def sample_line(self) -> bytes:
        """Returns the line of dropped.jsonl; a long text is cut, and the line says so."""
        row = {name: getattr(self, name) for name in self.__slots__}
        row["text"], row["cut"] = self.text[:LONGEST_SAMPLE], len(self.text) > LONGEST_SAMPLE
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)

    def sample_key(self, seed: int) -> int:
        """Returns its place in the random order from which the dropped sample is taken."""
        message = f"{seed}\0{self.id}\0{self.source}\0{self.offset}".encode()
        digest = hashlib.blake2b(message, digest_size=8, person=b"hydra dropped").digest()
        return int.from_bytes(digest, "little")


def read_rows(lines: bytes) -> list[Row]:
    """Returns the rows of `Row.line`s after one another."""
    return [Row(**orjson.loads(line)) for line in lines.splitlines()]
