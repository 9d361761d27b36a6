"""Chunks in order, joined into parts: the one writer of all that stays in the output folder.

A part is the chunks up to the one that fills it, so its bytes follow from the sources alone. Its
files appear whole; then filter.json moves on, then its chunk files go. A run that is killed between
these steps makes the part again, the same.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from nmoe_data.errors import DataError
from nmoe_data.files import TEMPORARY_SUFFIX, sync_path
from nmoe_data.hydra.filter.chunkfile import ChunkResult, Rejected, read_chunk
from nmoe_data.hydra.filter.decide import KEEP
from nmoe_data.hydra.filter.plan import Chunk
from nmoe_data.hydra.filter.result import DROPPED_NAME, KEPT_NAME, SCORES_NAME
from nmoe_data.hydra.filter.sample import Sample
from nmoe_data.hydra.filter.state import Place, State, write_state
from nmoe_data.hydra.filter.work import Job
from nmoe_data.hydra.labels import write_table
from nmoe_data.prep.rejects import RejectLog

PART_DOCUMENTS = 50_000

# From a function that reads a part's chunks anew to the same chunks with their band decided.
CloseBand = Callable[[Callable[[], Iterator[ChunkResult]]], Iterator[ChunkResult]]


class Parts:
    """Writes kept/, scores/, dropped.jsonl, rejected.jsonl and filter.json of one run.

    close_band: decides what the workers left open; None if they left nothing.
    """

    def __init__(
        self, out: Path, job: Job, state: State, close_band: CloseBand | None = None
    ) -> None:
        assert state.place is not None
        self._out = out
        self._job = job
        self._state = state
        self._close_band = close_band
        self._chunks: list[Chunk] = []
        self._documents = 0
        self._sample = Sample(out / DROPPED_NAME, job.sample, job.seed)
        (out / KEPT_NAME).mkdir(exist_ok=True)
        (out / SCORES_NAME).mkdir(exist_ok=True)
        self._rejects = RejectLog(out, state.place.rejected_bytes)
        self._sources = {
            f"{file.root}/{file.name}": domain
            for file, domain in zip(job.files, job.domains, strict=True)
        }

    @property
    def below(self) -> int:
        """Keys from here on can no longer come into the dropped sample."""
        return self._sample.below

    def add(self, chunk: Chunk, documents: int) -> bool:
        """Adds the next chunk in order; returns whether the part is full and is to be closed."""
        self._chunks.append(chunk)
        self._documents += documents
        return self._documents >= PART_DOCUMENTS

    def close_part(self, place: tuple[int, int, int], bytes_done: int) -> dict[str, Any]:
        """Writes the chunks added since the last part; `place` is the chunk behind them."""
        assert self._state.place is not None
        if self._documents:
            self._write_part(self._state.place.parts)
        else:
            for result in self._results():
                self._reject(result.rejected)
        self._sample.write()
        unit, index, known = place
        self._state.place = Place(
            unit=unit,
            index=index,
            known=known,
            parts=self._state.place.parts + (self._documents > 0),
            rejected_bytes=self._rejects.checkpoint(),
            bytes_done=bytes_done,
        )
        content = write_state(self._out, self._state)
        self.forget(self._chunks)
        self._chunks, self._documents = [], 0
        return content

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Removes the files of chunks that are in a part, or beyond the end of their file."""
        for chunk in chunks:
            (self._job.work / chunk.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Releases the files."""
        self._rejects.close()

    def _results(self) -> Iterator[ChunkResult]:
        for chunk in self._chunks:
            result = read_chunk(self._job.work / chunk.name, self._job.settings)
            if result is None:
                raise DataError(
                    "E-IO",
                    f"{self._job.work / chunk.name} is damaged or gone",
                    "run the same command again; it is made anew",
                )
            yield result

    def _write_part(self, number: int) -> None:
        kept = self._out / KEPT_NAME / f"part-{number:05d}.jsonl.zst"
        temporary = kept.with_name(kept.name + TEMPORARY_SUFFIX)
        tables: list[pa.Table] = []
        close = self._close_band
        results = self._results() if close is None else close(self._results)
        with temporary.open("wb") as file:
            for result in results:
                file.write(result.kept)
                tables.append(result.scores)
                self._reject(result.rejected)
                self._sample.add(result.dropped)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(kept)
        sync_path(kept.parent)
        table = pa.concat_tables(tables)
        self._count(table)
        write_table(self._out / SCORES_NAME / f"part-{number:05d}.parquet", table)

    def _reject(self, rejected: Sequence[Rejected]) -> None:
        counts = self._state.counts.rejected
        for row in rejected:
            counts[row.reason] = counts.get(row.reason, 0) + 1
            file = self._job.files[row.file]
            source = f"{file.root}/{file.name}"
            self._rejects.append(source, row.offset, row.reason, row.detail)

    def _count(self, table: pa.Table) -> None:
        counts = self._state.counts
        keys = ["source", "decision", "decided_by"]
        grouped = table.group_by(keys).aggregate([("bytes", "count"), ("bytes", "sum")])
        decided = Counter(counts.decided)
        for row in grouped.to_pylist():
            number, size = row["bytes_count"], row["bytes_sum"]
            domain = counts.domains.setdefault(
                self._sources[row["source"]], {"documents": 0, "kept": 0}
            )
            counts.documents += number
            counts.text_bytes += size
            domain["documents"] += number
            decided[f"{row['decided_by']} {row['decision']}"] += number
            if row["decision"] == KEEP:
                counts.kept += number
                counts.kept_bytes += size
                domain["kept"] += number
        counts.decided = dict(decided)
