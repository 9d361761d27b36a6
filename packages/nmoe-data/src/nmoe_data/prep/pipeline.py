"""The work of a run: documents in, shards out, the same bytes however often it was stopped.

Documents come from the sources in a fixed order and are tokenised in batches. A document's split
follows from the hash of its text, so equal texts always land on the same side. Every few seconds
the run makes its shards durable and records its cursor; a killed run goes on from there.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import nmoe_data
from nmoe_data.errors import DataError
from nmoe_data.files import sha256_file, sync_path
from nmoe_data.prep.rejects import REJECTED_NAME, RejectLog
from nmoe_data.prep.result import (
    HELD_OUT,
    TOKENIZER_NAME,
    TRAIN,
    PrepProgress,
    PrepResult,
    Progress,
    describe_result,
)
from nmoe_data.prep.state import STATE_NAME, RunState, write_state
from nmoe_data.shards import Manifest, ShardWriter, write_manifest
from nmoe_data.shards.layout import SCHEMA_VERSION, token_dtype
from nmoe_data.sources import Document, Rejection, SourceFile, read_documents
from nmoe_data.tokenizer import CONFIG_NAME, Tokenizer

BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 21
CHECKPOINT_SECONDS = 5.0
logger = logging.getLogger("nmoe_data")


class Pipeline:
    """One process's share of a run: from the state on disk to the manifests."""

    def __init__(
        self,
        out: Path,
        files: list[SourceFile],
        tokenizer: Tokenizer,
        state: RunState,
        progress: Progress | None,
    ) -> None:
        self._out = out
        self._files = files
        self._tokenizer = tokenizer
        self._state = state
        self._progress = progress
        self._sizes_before = [0]
        for file in files:
            self._sizes_before.append(self._sizes_before[-1] + file.size)
        self._check_sources()
        write_state(out, state)
        tokenizer.save(out / TOKENIZER_NAME)
        self._rejects = RejectLog(out, state.rejected_bytes)
        self._writers = {split: self._writer(split) for split in self._splits()}

    def run(self) -> PrepResult:
        try:
            self._read_all()
            self._checkpoint()
            return self._finish()
        finally:
            for writer in self._writers.values():
                writer.close()
            self._rejects.close()

    def _splits(self) -> list[str]:
        return [TRAIN, HELD_OUT] if self._state.arguments["held_out"] else [TRAIN]

    def _writer(self, split: str) -> ShardWriter:
        return ShardWriter(
            self._out / split,
            vocab_size=self._tokenizer.vocab_size,
            end_of_document_id=self._tokenizer.end_of_document_id,
            shard_tokens=self._state.arguments["shard_tokens"],
            state=self._state.writers.get(split),
        )

    def _check_sources(self) -> None:
        """Refuses to go on inside a file that has changed since the run was begun."""
        number = self._state.cursor.file
        if number >= len(self._state.sources):
            return
        file, recorded = self._files[number], self._state.sources[number]["sha256"]
        if recorded is not None and sha256_file(file.path) != recorded:
            raise DataError(
                "E-SOURCE-CHANGED",
                f"{file.path} has changed since the run was begun",
                "put the old file back, or start again with another --out",
            )

    def _read_all(self) -> None:
        saved = time.monotonic()
        for batch in self._batches():
            self._write_batch(batch)
            self._report(batch[-1])
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._checkpoint()
                saved = time.monotonic()

    def _batches(self) -> Iterator[list[Document | Rejection]]:
        """Yields runs of records; where they are cut follows from the cursor alone."""
        batch: list[Document | Rejection] = []
        characters = 0
        for item in self._limited():
            batch.append(item)
            characters += len(item.text) if isinstance(item, Document) else 0
            if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
        if batch:
            yield batch

    def _limited(self) -> Iterator[Document | Rejection]:
        limit = self._state.arguments["limit_bytes"]
        read = self._state.counts.text_bytes
        if limit is not None and read >= limit:
            return
        text_field = self._state.arguments["text_field"]
        for item in read_documents(self._files, self._state.cursor, text_field):
            yield item
            if limit is not None and isinstance(item, Document):
                read += len(item.text.encode())
                if read >= limit:
                    return

    def _write_batch(self, batch: list[Document | Rejection]) -> None:
        texts = [item.text for item in batch if isinstance(item, Document)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        for item in batch:
            self._begin_sources(item.source_index)
            self._state.counts.records_in += 1
            if isinstance(item, Document):
                self._write_document(item, next(encoded))
            else:
                self._reject(item.source_index, item.byte_offset, item.reason, item.detail)
        self._state.cursor = batch[-1].cursor

    def _write_document(self, document: Document, ids: list[int]) -> None:
        self._state.counts.text_bytes += len(document.text.encode())
        if self._tokenizer.end_of_document_id in ids:
            # Some Unigram vocabularies can spell their own end token; it must not end a document.
            detail = "the tokenizer made its end-of-document id out of text"
            self._reject(document.source_index, document.byte_offset, "end-id-in-text", detail)
            return
        self._writers[self._split_of(document)].append(
            ids,
            source=document.source_index,
            offset=document.byte_offset,
            document_id=document.id,
        )
        self._state.counts.documents_out += 1

    def _split_of(self, document: Document) -> str:
        """Held out by the hash of the text; but the first document always trains.

        A source of one document, a single file, would else be all held out, or not, by its hash.
        """
        if self._state.first_document is None:
            self._state.first_document = document.id
        held_out = document.id < self._state.arguments["held_out"] * 2.0**64
        return HELD_OUT if held_out and document.id != self._state.first_document else TRAIN

    def _reject(self, source_index: int, offset: int, reason: str, detail: str) -> None:
        rejected = self._state.counts.rejected
        rejected[reason] = rejected.get(reason, 0) + 1
        file = self._files[source_index]
        self._rejects.append(f"{file.root}/{file.name}", offset, reason, detail)

    def _begin_sources(self, source_index: int) -> None:
        """Notes every file up to this one, with its hash, in the order of the listing."""
        for file in self._files[len(self._state.sources) : source_index + 1]:
            entry = {"root": file.root, "name": file.name, "size": file.size, "sha256": None}
            with suppress(OSError):  # the reader has rejected it as unreadable
                entry["sha256"] = sha256_file(file.path) if file.supported else None
            self._state.sources.append(entry)

    def _report(self, last: Document | Rejection) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self._progress_now(last))
        except KeyboardInterrupt:
            self._checkpoint()
            raise

    def _progress_now(self, last: Document | Rejection) -> PrepProgress:
        counts = self._state.counts
        limit = self._state.arguments["limit_bytes"]
        done = self._sizes_before[last.source_index] + last.consumed
        total = self._sizes_before[-1]
        if limit is not None and limit < total:
            done, total = min(counts.text_bytes, limit), limit
        return PrepProgress(
            bytes_done=done,
            bytes_total=total,
            documents=counts.documents_out,
            tokens=sum(writer.tokens for writer in self._writers.values()),
            rejected=sum(counts.rejected.values()),
        )

    def _checkpoint(self) -> None:
        writers = {split: writer.checkpoint() for split, writer in self._writers.items()}
        self._state.writers = writers
        self._state.rejected_bytes = self._rejects.checkpoint()
        write_state(self._out, self._state)

    def _finish(self) -> PrepResult:
        self._check_not_empty()
        manifests = {split: self._manifest(split) for split in self._splits()}
        # The train manifest comes last: where it stands, everything else does.
        for split in reversed(self._splits()):
            write_manifest(self._out / split, manifests[split])
        (self._out / STATE_NAME).unlink()
        sync_path(self._out)
        counts = self._state.counts
        logger.info("prepared %d documents, rejected %s", counts.documents_out, counts.rejected)
        return describe_result(self._out, manifests, reused=False)

    def _check_not_empty(self) -> None:
        if self._writers[TRAIN].documents:
            return
        self._forget()
        raise DataError(
            "E-NO-TEXT",
            "the source holds no usable text "
            f"(rejected: {self._state.counts.to_json()['rejected']})",
            f"see {self._out / REJECTED_NAME} for each record and its reason",
        )

    def _forget(self) -> None:
        """Leaves only the reject file, so that the same folder can be used for a better source."""
        for split in self._splits():
            with suppress(OSError):  # not empty: then it holds something that is not ours
                (self._out / split).rmdir()
        (self._out / TOKENIZER_NAME).unlink()
        (self._out / CONFIG_NAME).unlink(missing_ok=True)
        (self._out / STATE_NAME).unlink()

    def _manifest(self, split: str) -> Manifest:
        shards = self._writers[split].finish()
        tokenizer = self._tokenizer
        return Manifest(
            schema_version=SCHEMA_VERSION,
            tool=f"nmoe-data {nmoe_data.__version__}",
            command=self._state.command,
            split=split,
            tokenizer={
                "name": tokenizer.name,
                "hash": tokenizer.hash,
                "vocab_size": tokenizer.vocab_size,
                "end_of_document_id": tokenizer.end_of_document_id,
            },
            dtype=token_dtype(tokenizer.vocab_size).name,
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            arguments=self._state.arguments,
            counts=self._state.counts.to_json(),
            shards=shards,
            sources=self._state.sources,
        )
