"""What one worker does with one chunk: read, encode, decide, write the chunk's file.

A chunk's documents are encoded in the same batches whichever worker has it, and a worker on CPUs
computes with one thread; so the bytes it writes depend on the chunk and the settings alone.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import zstandard

from nmoe_data.errors import DataError
from nmoe_data.files import os_errors
from nmoe_data.hydra.calibrate import Calibration
from nmoe_data.hydra.documents import document_id
from nmoe_data.hydra.encoder import Encoder, open_encoder
from nmoe_data.hydra.filter.chunkfile import (
    SCORES_SCHEMA,
    ChunkResult,
    Rejected,
    write_chunk,
)
from nmoe_data.hydra.filter.decide import DROP, KEEP, OPEN, Decisions, decide
from nmoe_data.hydra.filter.plan import Chunk
from nmoe_data.hydra.filter.reading import ChunkReader
from nmoe_data.hydra.filter.row import Row
from nmoe_data.hydra.heads import Heads, open_heads
from nmoe_data.sources import Record, SourceFile

BATCH_DOCUMENTS = 512
BATCH_CHARACTERS = 1 << 21
# Speed before size: at 3 the compression takes a tenth of the fastest encoder's time.
ZSTANDARD_LEVEL = 1
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """What all workers of a run share.

    files, domains: of the listing, by number. work: the folder of the chunk files. settings: the
    fingerprint that they carry. band: KEEP or DROP, what becomes of the band; OPEN leaves it for
    the judge. sample: most dropped documents to show. dtype: in which neural encoders compute.
    """

    files: list[SourceFile]
    domains: list[str]
    heads: Path
    heads_hash: str
    work: Path
    settings: str
    text_field: str
    band: str
    sample: int
    seed: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Task:
    """One chunk to do. known: see `ChunkReader.read`. below: keys from here on are no sample."""

    chunk: Chunk
    known: int
    below: int


@dataclass(frozen=True, slots=True)
class Done:
    """A chunk whose file is written: what the coordinator has to know of it at once."""

    chunk: Chunk
    position: int
    consumed: int
    documents: int
    kept: int
    rejected: int

    @classmethod
    def of(cls, chunk: Chunk, result: ChunkResult) -> "Done":
        """Returns what a chunk's result says."""
        return cls(
            chunk,
            result.position,
            result.consumed,
            result.scores.num_rows,
            result.scores["decision"].to_pylist().count(KEEP),
            len(result.rejected),
        )


class Worker:
    """Does chunks with one encoder on one device, in any order.

    Raises DataError: those of `open_heads` and `open_encoder`; E-HYDRA-RESUME if the heads are no
    longer those that the run was begun with.
    """

    def __init__(self, job: Job, device: str) -> None:
        self._job = job
        self._heads: Heads = open_heads(job.heads)
        if self._heads.hash != job.heads_hash:
            raise DataError(
                "E-HYDRA-RESUME", f"{job.heads} changed under the run", "restore it, or start again"
            )
        assert self._heads.calibration is not None
        self._calibration: Calibration = self._heads.calibration
        self._encoder: Encoder = open_encoder(
            self._heads.encoder_spec, device=device, dtype=job.dtype
        )
        self._heads.check_encoder(self._encoder)
        self._reader = ChunkReader(job.files, job.text_field)
        self._parent = os.getppid()

    def run(self, task: Task) -> Done:
        """Does one chunk and writes its file.

        Raises DataError: those of `os_errors` where it cannot be written.
        """
        build = _Building(self._job, task.below, self._heads.rubric.names)
        for batch in self._batches(task):
            self._do(batch, build)
        result = build.result(self._reader.position, self._reader.consumed)
        path = self._job.work / task.chunk.name
        with os_errors("write", path):
            if os.getppid() != self._parent:
                # Another run may own the folder by now.
                raise SystemExit
            write_chunk(path, result, self._job.settings)
        return Done.of(task.chunk, result)

    def _batches(self, task: Task) -> Iterator[list[tuple[int, Record]]]:
        batch: list[tuple[int, Record]] = []
        characters = 0
        for number, record in self._reader.read(task.chunk, task.known):
            batch.append((number, record))
            characters += len(record.text or "")
            if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _do(self, batch: Sequence[tuple[int, Record]], build: "_Building") -> None:
        documents = []
        for number, record in batch:
            if record.text is None:
                at, reason, detail = record.position, record.reason, record.detail
                build.reject(Rejected(number, at, reason, detail))
            else:
                documents.append(_Text(number, record.position, record.text))
        if not documents:
            return
        decisions = decide(
            self._heads,
            self._calibration,
            self._encoder,
            [document.text for document in documents],
            [self._job.domains[document.file] for document in documents],
        )
        build.add(documents, decisions)


@dataclass(frozen=True, slots=True)
class _Text:
    """A document: its file's number, where its record is, its text."""

    file: int
    offset: int
    text: str


class _Building:
    """A chunk's result while its batches come by."""

    def __init__(self, job: Job, below: int, names: Sequence[str]) -> None:
        self._job = job
        self._below = below
        self._names = names
        self._tables: list[pa.Table] = []
        self._frame = zstandard.ZstdCompressor(level=ZSTANDARD_LEVEL).compressobj()
        self._compressed: list[bytes] = []
        self._dropped: list[tuple[int, bytes]] = []
        self._rejected: list[Rejected] = []

    def reject(self, rejected: Rejected) -> None:
        self._rejected.append(rejected)

    def add(self, documents: Sequence[_Text], made: Decisions) -> None:
        """Adds documents with what was decided about them."""
        decision = [self._job.band if each == OPEN else each for each in made.decision]
        rows = self._rows(documents, made)
        for row, each in zip(rows, decision, strict=True):
            if each == DROP:
                self._sample(row)
            else:
                self._compressed.append(self._frame.compress(row.line()))
        self._tables.append(_score_table(rows, made, decision))

    def result(self, position: int, consumed: int) -> ChunkResult:
        """Returns the whole chunk."""
        self._compressed.append(self._frame.flush())
        return ChunkResult(
            position=position,
            consumed=consumed,
            scores=pa.concat_tables([SCORES_SCHEMA.empty_table(), *self._tables]),
            kept=b"".join(self._compressed),
            dropped=sorted(self._dropped)[: self._job.sample],
            rejected=self._rejected,
        )

    def _rows(self, documents: Sequence[_Text], made: Decisions) -> list[Row]:
        # Rounded as doubles: the nearest short decimal, so that lines stay short.
        scores = made.scores.astype(float).round(DIGITS).tolist()
        qualities = made.quality.astype(float).round(DIGITS).tolist()
        files = self._job.files
        return [
            Row(
                text=document.text,
                id=document_id(document.text),
                source=f"{files[document.file].root}/{files[document.file].name}",
                offset=document.offset,
                quality=qualities[i],
                scores=dict(zip(self._names, scores[i], strict=True)),
                decided_by=made.decided_by[i],
            )
            for i, document in enumerate(documents)
        ]

    def _sample(self, row: Row) -> None:
        key = row.sample_key(self._job.seed)
        if key < self._below:
            self._dropped.append((key, row.sample_line()))


def _score_table(rows: Sequence[Row], made: Decisions, decision: Sequence[str]) -> pa.Table:
    count, dimensions = made.scores.shape
    ends = np.arange(count + 1, dtype=np.int32) * dimensions
    columns = [
        pa.array([row.id for row in rows], pa.string()),
        pa.array([row.source for row in rows], pa.string()),
        pa.array([row.offset for row in rows], pa.int64()),
        pa.array([_size(row.text) for row in rows], pa.int64()),
        pa.array(made.probe_quality, pa.float32()),
        # NaN, where the judge head was not asked, becomes null.
        pa.array(made.judge_quality, pa.float32(), from_pandas=True),
        pa.array(made.quality, pa.float32()),
        pa.ListArray.from_arrays(ends, made.scores.ravel()),
        pa.array(decision, pa.string()),
        pa.array(made.decided_by, pa.string()),
    ]
    return pa.table(columns, schema=SCORES_SCHEMA)


def _size(text: str) -> int:
    """Returns the bytes of a text in UTF-8; of ASCII without making them."""
    return len(text) if text.isascii() else len(text.encode())
